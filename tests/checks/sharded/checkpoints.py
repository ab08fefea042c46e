"""Checkpoints, copies and failures under ``ring_sharded``: whole weights and ordinary optimizer
states.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DistributedSampler

from lightning_ring import RingStrategy
from lightning_ring.errors import CollectiveError, ConfigurationError, RingError
from lightning_ring.integrations.lightning.stop_requests import StopRequest
from tests.checks.marks import by_world_size
from tests.checks.models import (
    RANK,
    SIZE,
    Classifier,
    data,
    fit,
    loader,
    parameters,
    relative_difference,
    trainer,
)
from tests.checks.sharded.late import Late, LateRing, LateWork, run_late
from tests.checks.sharded.references import CAP, With, assert_same, make_sgd, sharded
from tests.strategies import ring


@by_world_size
def check_state_is_a_share_and_its_checkpoint_is_ordinary(tmp_path: Path) -> None:
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


def check_checkpoints_resume_under_any_strategy(tmp_path: Path) -> None:
    def make() -> Any:
        return With(lambda m: AdamW(m.parameters(), lr=0.01))

    def half(strategy: Any, name: str) -> None:
        L.seed_everything(7, verbose=False)
        fit(strategy, make(), max_epochs=1).save_checkpoint(tmp_path / name)

    def rest(strategy: Any, name: str) -> Any:
        module = make()
        trainer(strategy, max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / name)
        return module

    half(sharded(), "sharded.ckpt")
    half(RingStrategy(bucket_cap_mb=CAP), "ring.ckpt")
    results = [
        rest(strategy(), name)
        for strategy in (sharded, functools.partial(RingStrategy, bucket_cap_mb=CAP))
        for name in ("sharded.ckpt", "ring.ckpt")
    ]
    for result in results[1:]:
        assert_same(results[0], result)
    wrong = make()
    wrong.net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        trainer(sharded(), max_epochs=2).fit(wrong, loader(), ckpt_path=tmp_path / "ring.ckpt")
    assert not isinstance(caught.value, RingError)


def check_state_dict_of_a_part_is_refused() -> None:
    class Asking(With):
        def on_train_end(self) -> None:
            with pytest.raises(ConfigurationError, match="optimizer_state"):
                self.trainer.optimizers[0].state_dict()
            states.append(self.trainer.strategy.optimizer_state(self.optimizers()))

    states: list[dict[str, Any]] = []
    fit(sharded(), Asking(lambda m: AdamW(m.parameters(), lr=0.01)), max_epochs=1)
    assert bool(states[0]) == (RANK == 0)


def check_a_stop_of_all_ranks_saves_the_whole_state(tmp_path: Path) -> None:
    class Stopping(With):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
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
    MPI.COMM_WORLD.Barrier()
    state = torch.load(tmp_path / "stopped.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert [tuple(s["exp_avg"].shape) for s in state.values()] == [
        tuple(p.shape) for p in make().parameters()
    ]


def check_a_checkpoint_goes_on_in_one_process(tmp_path: Path) -> None:
    def make() -> Any:
        return With(lambda m: AdamW(m.parameters(), lr=0.01))

    L.seed_everything(7, verbose=False)
    double = {"precision": "64-true"}
    fit(sharded(), make(), max_epochs=1, **double).save_checkpoint(tmp_path / "half.ckpt")
    MPI.COMM_WORLD.Barrier()
    together, alone = make(), make()
    mine = loader(sampler=DistributedSampler(data(), SIZE, RANK, shuffle=False))
    run = trainer(sharded(), max_epochs=2, use_distributed_sampler=False, **double)
    run.fit(together, mine, ckpt_path=tmp_path / "half.ckpt")
    if RANK == 0:  # one process sees the batches of all ranks at once
        run = trainer("auto", devices=1, max_epochs=2, **double)
        run.fit(alone, loader(batch_size=4 * SIZE), ckpt_path=tmp_path / "half.ckpt")
        assert run.world_size == 1
        assert relative_difference(parameters(alone), parameters(together)) < 1e-12
    MPI.COMM_WORLD.Barrier()


def check_a_checkpoint_after_an_exception_holds_whole_weights_and_resumes(tmp_path: Path) -> None:
    class Corrupt(With):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise OSError("corrupt photo")

    def make(kind: Any = With) -> Any:
        L.seed_everything(7, verbose=False)
        return kind(lambda m: AdamW(m.parameters(), lr=0.01))

    saves = OnExceptionCheckpoint(tmp_path, "late")
    strategy = ring(True, LateRing, bucket_cap_mb=CAP)
    with pytest.raises(OSError, match="corrupt photo"):
        fit(strategy, make(Corrupt), callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    MPI.COMM_WORLD.Barrier()
    expected = make()
    fit(RingStrategy(bucket_cap_mb=CAP), expected, max_epochs=1, limit_train_batches=3)
    saved = make()
    saved.load_state_dict(torch.load(tmp_path / "late.ckpt", weights_only=True)["state_dict"])
    assert_same(saved, expected)
    for strategy in (sharded(), RingStrategy(bucket_cap_mb=CAP)):
        with (
            pytest.warns(UserWarning, match="no state for some")
            if RANK == 0
            else contextlib.nullcontext()
        ):
            trainer(strategy, max_epochs=2).fit(make(), loader(), ckpt_path=tmp_path / "late.ckpt")


def check_weights_that_do_not_arrive_after_an_exception_are_a_warning(tmp_path: Path) -> None:
    class LostWork(LateWork):
        def wait(self) -> None:
            if lost:
                raise CollectiveError("lost")
            super().wait()

    class Losing(Late):
        def all_gather_(self, flat: Tensor, *, name: str = "") -> Any:
            buffer = flat.clone()
            return LostWork(self._comm.all_gather_(buffer, name=name), buffer, flat)

    class LosingRing(LateRing):
        def setup_distributed(self) -> None:
            super().setup_distributed()
            self._job.communicator = self.late = Losing(self.late._comm)

    class Raising(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 1:
                lost.append(True)
                raise OSError("corrupt photo")
            return super().training_step(batch, batch_idx)

    lost: list[bool] = []
    saves = OnExceptionCheckpoint(tmp_path, "torn")
    warned = (
        pytest.warns(UserWarning, match="weights.*mix") if RANK == 0 else contextlib.nullcontext()
    )
    strategy = ring(True, LosingRing, bucket_cap_mb=CAP)
    with warned, pytest.raises(OSError, match="corrupt photo"):
        fit(strategy, Raising(), callbacks=[saves], enable_checkpointing=True, max_epochs=1)


def check_weights_loaded_after_training_stay(tmp_path: Path) -> None:
    module = Classifier()
    before = copy.deepcopy(module.state_dict())
    run = trainer(ring(True, LateRing, bucket_cap_mb=CAP), max_epochs=1, default_root_dir=tmp_path)
    Tuner(run).lr_find(module, loader(), num_training=4)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


class Copied(With):
    """A class that pickle finds, copied and saved in the middle of training."""

    copies: ClassVar[list[Any]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            file = io.BytesIO()
            torch.save(self, file)
            file.seek(0)
            self.copies += [copy.deepcopy(self), torch.load(file, weights_only=False)]
            self.copies += [
                copy.deepcopy(self.net),
                [p.detach().clone() for p in self.parameters()],
            ]


def check_modules_can_be_copied_and_saved_during_training() -> None:
    Copied.copies.clear()
    module = Copied(make_sgd)
    run_late(module)
    copied, saved, net, values = Copied.copies
    for other in (copied, saved, net):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), values, strict=True))
    for other in (copied, saved):
        other.loss([part[:4] for part in data()[:4]]).backward()
        assert other.on_train_batch_end.__self__ is other
        fit(RingStrategy(bucket_cap_mb=CAP), other, max_epochs=1)
    assert not torch.equal(parameters(copied), parameters(module))
