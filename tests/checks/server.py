"""Parameter servers on real ranks: through the Trainer, `distribute`
and Fabric.
"""

import copy
import time
from itertools import pairwise
from pathlib import Path

import lightning as L
import pytest
import torch
from mpi4py import MPI
from torch.utils.data import DataLoader, IterableDataset

from lightning_ring import RingStrategy, distribute
from lightning_ring.algorithms.server import ParameterServer
from lightning_ring.errors import ConfigurationError, UnevenBatchesError
from tests.checks.loops import batches, loss_of, network
from tests.checks.models import (
    Classifier,
    assert_all_ranks_equal,
    data,
    loader,
    parameters,
    trainer,
)
from tests.checks.stepping_alone import FabricLoop, Noted, fit_and_save, saved_parameters
from tests.checks.strategy.references import scaler_plugin

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size


class Timed(Noted):
    """A slow rank waits for ``awaited`` files before its fifth batch. Its logs wait for no rank."""

    def __init__(self, awaited=()):
        super().__init__()
        self.awaited = awaited
        self.num_batches = 0

    def training_step(self, batch, batch_idx):
        if self.num_batches == 4:
            until = time.monotonic() + 60
            while missing := [file.name for file in self.awaited if not file.exists()]:
                assert time.monotonic() < until, f"{missing}: other ranks are held up"
                time.sleep(0.01)
        return self.loss(batch)

    def on_train_batch_end(self, *_):
        self.num_batches += 1


class Tells(L.Callback):
    """Writes ``file`` after nine batches."""

    def __init__(self, file):
        self.file = file

    def on_train_batch_end(self, trainer, module, *_):
        if module.num_batches == 8:  # a callback comes before the module's own hook
            self.file.touch()


def check_bulk_mode_has_the_bits_of_ring_in_checkpoints_too(tmp_path):
    folder = Path(MPI.COMM_WORLD.bcast(str(tmp_path)))

    def run(strategy, name, ckpt_path=None):
        L.seed_everything(5, verbose=False)
        module = Timed()
        limits = {"limit_train_batches": 4, "limit_val_batches": 1, "accumulate_grad_batches": 2}
        fit_and_save(strategy, module, folder / name, ckpt_path=ckpt_path, **limits)
        return module

    def compare(found, expected):
        exact = {"rtol": 0.0, "atol": 0.0} if SIZE == 2 else {"rtol": 1e-4, "atol": 1e-6}
        torch.testing.assert_close(found, expected, **exact)

    expected = run(RingStrategy(), "ring")
    whole = run(RingStrategy(algorithm=ParameterServer()), "whole")
    one = run(RingStrategy(algorithm=ParameterServer(servers=1)), "one")
    paths = [str(folder / name / "epoch=0.ckpt") for name in ("ring", "whole", "one")]
    saved = [torch.load(path, weights_only=True) for path in paths]
    for module, checkpoint in ((whole, saved[1]), (one, saved[2])):
        compare(parameters(module), parameters(expected))
        compare(torch.stack(module.validated), torch.stack(expected.validated))
        assert_all_ranks_equal(parameters(module))
        compare(
            checkpoint["optimizer_states"][0]["state"], saved[0]["optimizer_states"][0]["state"]
        )
    resumed = run(RingStrategy(algorithm=ParameterServer()), "resumed", paths[1])
    assert torch.equal(parameters(resumed), parameters(whole))
    for strategy, path in (
        (RingStrategy(), paths[2]),
        (RingStrategy(algorithm=ParameterServer()), paths[0]),
    ):
        compare(parameters(run(strategy, "elsewhere", path)), parameters(expected))


def check_a_slow_rank_with_fewer_batches_holds_nobody_up(tmp_path):
    """The others take their steps meanwhile, and wait at the end of the epoch, whose weights are
    those of all.
    """
    folder = Path(MPI.COMM_WORLD.bcast(str(tmp_path)))
    slow = RANK == SIZE - 1
    compensated = {"delay_compensation": 0.04}
    for name, num_epochs, algorithm in (
        ("async", 2, ParameterServer(1, "async", **compensated)),
        ("on all", 1, ParameterServer(None, "async", **compensated)),
    ):
        L.seed_everything(5, verbose=False)
        files = [folder / f"{name}.{rank}.through" for rank in range(SIZE)]
        module = Timed(files[:-1] if slow else ())
        arguments = {
            "use_distributed_sampler": False,
            "gradient_clip_val": 1.0,
            "max_epochs": num_epochs,
        }
        arguments |= {"callbacks": [Tells(files[RANK])]}
        batches_here = DataLoader(data(4 * (5 if slow else 9)), 4)
        fit_and_save(
            RingStrategy(algorithm=algorithm), module, folder / name, batches_here, **arguments
        )
        assert module.num_batches == num_epochs * (5 if slow else 9)
        for shown in module.validated:
            assert_all_ranks_equal(shown)
        assert_all_ranks_equal(parameters(module))
        assert torch.equal(
            saved_parameters(folder / name / "epoch=0.ckpt", module), module.validated[0]
        )


def check_loops_over_every_backend():
    inputs = batches(8)
    for backend in ("mpi", "gloo", "auto"):
        for mode in ("bulk", "async"):
            net = network()
            optimizer = torch.optim.AdamW(net.parameters(), 0.01)
            with distribute(
                net, optimizer, algorithm=ParameterServer(mode=mode), backend=backend
            ) as training:
                for batch in inputs:
                    loss_of(net(batch)).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if mode == "bulk":
                        assert_all_ranks_equal(parameters(net))
                training.show_averages()
                assert_all_ranks_equal(parameters(net))
                assert (training.optimizer_state_dict(optimizer) != {}) == (RANK == 0)
            steps = {float(state["step"]) for state in optimizer.state_dict()["state"].values()}
            assert steps == {8.0 if mode == "bulk" else 8.0 * SIZE}


def check_a_rank_without_a_batch_takes_part_in_evaluations_and_checkpoints():
    """Once before any other batch of its own."""
    inputs = batches(8)
    for idle in (0, 1):
        for algorithm in (ParameterServer(mode="async"),):
            net = network()
            optimizer = torch.optim.AdamW(net.parameters(), 0.01)
            shown = [parameters(net)]
            with distribute(net, optimizer, algorithm=algorithm) as training:
                for number in (0 if idle == RANK else 3, 2, 0 if idle == RANK else 1, 0):
                    for batch in inputs[:number]:
                        loss_of(net(batch)).backward()
                        optimizer.step()
                        optimizer.zero_grad()
                    training.show_averages()
                    shown.append(parameters(net))
                    assert_all_ranks_equal(shown[-1])
                    assert training.state_dict() or RANK != 0
            moved = [not torch.equal(before, after) for before, after in pairwise(shown)]
            assert moved == [True, True, True, False]


class Stream(IterableDataset):
    """As many samples in each of its iterations, and none in further ones."""

    def __init__(self, *lengths):
        self.lengths = list(lengths)

    def __iter__(self):
        length = self.lengths.pop(0) if self.lengths else 0  # once the first sample is asked for
        yield from (data()[i] for i in range(length))


def check_a_trainers_rank_without_a_training_batch_is_an_error_of_every_rank():
    here = 0 if RANK == SIZE - 1 else 8

    def said(algorithm, train, steps=0, **arguments):
        """The error after ``steps`` steps."""
        job = trainer(RingStrategy(algorithm=algorithm), use_distributed_sampler=False, **arguments)
        with pytest.raises(UnevenBatchesError) as caught:
            job.fit(Timed(), train)
        assert job.global_step == steps
        return str(caught.value)

    for algorithm in (ParameterServer(mode="async"),):
        empty = [
            said(algorithm, DataLoader(data(here), 4)),
            said(algorithm, [DataLoader(data(here), 4), DataLoader(data(here), 2)]),
            said(
                algorithm, DataLoader(data(4 * (1 if here == 0 else 2)), 4), limit_train_batches=0.5
            ),
            said(algorithm, DataLoader(Stream(here), 4)),
            said(algorithm, DataLoader(Stream(8, here), 4), steps=2),
        ]
        assert all(
            error.startswith(f"rank {SIZE - 1} has no training batch at all in this epoch")
            for error in empty
        )
        assert MPI.COMM_WORLD.allgather(empty) == [empty] * SIZE


def check_fabric_saves_the_servers_weights_and_goes_on_from_them(tmp_path):
    path = MPI.COMM_WORLD.bcast(str(tmp_path / "saved.ckpt"))
    modes = ("bulk", "async")
    for mode in modes:
        loop = FabricLoop(ParameterServer(mode=mode), seed=3)
        loop.train(range(4))
        loop.fabric.save(path, loop.state)
        shown = parameters(loop.model)
        assert_all_ranks_equal(shown)
        straight = loop.train(range(4, 8))
        again = FabricLoop(ParameterServer(mode=mode), seed=9)
        again.train(range(2))  # what is loaded replaces it
        again.fabric.load(path, again.state)
        assert torch.equal(parameters(again.model), shown)
        if mode == "bulk":
            assert torch.equal(again.train(range(4, 8)), straight)


def check_what_cannot_work_is_refused():
    bulk = RingStrategy(algorithm=ParameterServer())
    with pytest.raises(ConfigurationError, match=r"gradient_clip_val=0\.5, but ParameterServer"):
        trainer(bulk, gradient_clip_val=0.5).fit(Classifier(), loader())
    with pytest.raises(ConfigurationError, match="loss scaler"):
        trainer(RingStrategy(algorithm=ParameterServer()), plugins=[scaler_plugin()]).fit(
            Classifier(), loader()
        )

    class Clipping(Timed):
        def configure_gradient_clipping(self, optimizer, **_):
            self.clip_gradients(optimizer, 0.5, "value")

    clipping = trainer(RingStrategy(algorithm=ParameterServer()))
    with pytest.raises(ConfigurationError, match=r"clipped at 0\.5, but ParameterServer"):
        clipping.fit(Clipping(), loader())
    assert "clip_gradients" not in vars(clipping.precision_plugin)
    loop = FabricLoop(ParameterServer(), seed=3)
    loop.fabric.backward(loss_of(loop.model(batches(1)[0])))
    with pytest.raises(ConfigurationError, match="clipped by value, but ParameterServer"):
        loop.fabric.clip_gradients(loop.model, loop.optimizer, clip_val=0.5)
    loop.fabric.strategy.teardown()
    net = network()
    with distribute(net, algorithm=ParameterServer()):
        loss_of(net(batches(1)[0])).backward()
        with pytest.raises(ConfigurationError, match="SGD that ParameterServer does not know"):
            torch.optim.SGD(
                copy.deepcopy(list(net.parameters())) + list(net.parameters()), 0.1
            ).step()
