"""Checkpoints, copies and failures under ``ring_sharded``: whole weights and ordinary optimizer
states.
"""

import contextlib
import copy
import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import AdamW

from lightning_ring import RingStrategy
from lightning_ring.errors import CollectiveError, ConfigurationError
from lightning_ring.integrations.lightning.stop_requests import StopRequest
from tests.checks.marks import by_world_size
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    fit,
    loader,
    trainer,
    warned_on_rank_0,
)
from tests.checks.sharded.late import Late, LateRing, LateWork
from tests.checks.sharded.references import CAP, With, assert_same, sharded
from tests.strategies import ring


@by_world_size
def check_state_is_a_share_and_its_checkpoint_is_ordinary(tmp_path):
    make = functools.partial(With, lambda m: AdamW(m.parameters(), lr=0.01))
    states = []
    for index, strategy in enumerate((sharded(), RingStrategy(bucket_cap_mb=CAP))):
        L.seed_everything(7, verbose=False)
        run = fit(strategy, make(), max_epochs=1)
        with run.strategy.algorithm.states_shown() if not index else contextlib.nullcontext():
            state = dict(run.optimizers[0].state)
        states.append(sum(v.numel() for s in state.values() for v in s.values() if v.dim()))
        run.save_checkpoint(tmp_path / f"{index}.ckpt")  # after the end of fit, too
        run.strategy.barrier()
    padding = 2 * 4 * 16  # two moments, four parameters, one cache line
    assert states[0] <= states[1] / SIZE + padding, states
    mine, reference = (
        torch.load(tmp_path / f"{i}.ckpt", weights_only=True)["optimizer_states"][0] for i in (0, 1)
    )
    assert mine["param_groups"] == reference["param_groups"]
    assert mine["state"].keys() == reference["state"].keys()
    for index, state in reference["state"].items():
        for key, value in state.items():
            assert value.shape == mine["state"][index][key].shape
            torch.testing.assert_close(mine["state"][index][key], value, rtol=1e-6, atol=1e-9)


def check_state_dict_of_a_part_is_refused():
    class Asking(With):
        def on_train_end(self):
            with pytest.raises(ConfigurationError, match="optimizer_state"):
                self.trainer.optimizers[0].state_dict()
            states.append(self.trainer.strategy.optimizer_state(self.optimizers()))

    states = []
    fit(sharded(), Asking(lambda m: AdamW(m.parameters(), lr=0.01)), max_epochs=1)
    assert bool(states[0]) == (RANK == 0)


def check_a_stop_of_all_ranks_saves_the_whole_state(tmp_path):
    class Stopping(With):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 1 and RANK == SIZE - 1:
                self.trainer.strategy._requests.request(StopRequest.STOP)

    make = functools.partial(Stopping, lambda m: AdamW(m.parameters(), lr=0.01))
    with pytest.raises(SIGTERMException):
        fit(
            sharded(),
            make(),
            callbacks=[OnExceptionCheckpoint(tmp_path, "stopped")],
            enable_checkpointing=True,
        )
    WORLD.Barrier()
    state = torch.load(tmp_path / "stopped.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert [tuple(s["exp_avg"].shape) for s in state.values()] == [
        tuple(p.shape) for p in make().parameters()
    ]


def check_a_checkpoint_after_an_exception_holds_whole_weights_and_resumes(tmp_path):
    class Corrupt(With):
        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 3:
                raise OSError("corrupt photo")

    def make(kind=With):
        L.seed_everything(7, verbose=False)
        return kind(lambda m: AdamW(m.parameters(), lr=0.01))

    saves = OnExceptionCheckpoint(tmp_path, "late")
    strategy = ring(True, LateRing, bucket_cap_mb=CAP)
    with pytest.raises(OSError, match="corrupt photo"):
        fit(strategy, make(Corrupt), callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    WORLD.Barrier()
    expected = make()
    fit(RingStrategy(bucket_cap_mb=CAP), expected, max_epochs=1, limit_train_batches=3)
    saved = make()
    saved.load_state_dict(torch.load(tmp_path / "late.ckpt", weights_only=True)["state_dict"])
    assert_same(saved, expected)
    for strategy in (sharded(), RingStrategy(bucket_cap_mb=CAP)):
        with warned_on_rank_0("no state for some"):
            trainer(strategy, max_epochs=2).fit(make(), loader(), ckpt_path=tmp_path / "late.ckpt")


def check_weights_that_do_not_arrive_after_an_exception_are_a_warning(tmp_path):
    class LostWork(LateWork):
        def wait(self):
            if lost:
                raise CollectiveError("lost")
            super().wait()

    class Losing(Late):
        def all_gather_(self, flat, *, name=""):
            buffer = flat.clone()
            return LostWork(self._comm.all_gather_(buffer, name=name), buffer, flat)

    class LosingRing(LateRing):
        def setup_distributed(self):
            super().setup_distributed()
            self._job.communicator = self.late = Losing(self.late._comm)

    class Raising(Classifier):
        def training_step(self, batch, batch_idx):
            if self.trainer.global_step == 1:
                lost.append(True)
                raise OSError("corrupt photo")
            return super().training_step(batch, batch_idx)

    lost = []
    saves = OnExceptionCheckpoint(tmp_path, "torn")
    strategy = ring(True, LosingRing, bucket_cap_mb=CAP)
    with warned_on_rank_0("weights.*mix"), pytest.raises(OSError, match="corrupt photo"):
        fit(strategy, Raising(), callbacks=[saves], enable_checkpointing=True, max_epochs=1)


def check_weights_loaded_after_training_stay(tmp_path):
    module = Classifier()
    before = copy.deepcopy(module.state_dict())
    run = trainer(ring(True, LateRing, bucket_cap_mb=CAP), max_epochs=1, default_root_dir=tmp_path)
    Tuner(run).lr_find(module, loader(), num_training=4)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name
