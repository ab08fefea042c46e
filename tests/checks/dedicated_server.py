"""Parameter servers on ranks of their own: through `distribute` and Fabric, on 3 ranks and more."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingFabricStrategy, RingStrategy, distribute
from lightning_ring.algorithms.server import ParameterServer
from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.monitor import LoopMonitor
from tests.checks.fabric import ring
from tests.checks.loops import loss_of, network
from tests.checks.models import Classifier, assert_all_ranks_equal, loader, parameters, trainer

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
NUM_SERVERS = max(1, SIZE - 2)  # two workers, which have the bits of a ring
NUM_SAMPLES, BATCH_SIZE = 64, 4


def samples() -> TensorDataset:
    return TensorDataset(torch.randn(NUM_SAMPLES, 6, generator=torch.Generator().manual_seed(7)))


def server(mode: Any = "bulk", **how: Any) -> ParameterServer:
    return ParameterServer(NUM_SERVERS, mode, dedicated=True, **how)


class Loop:
    """Two epochs or more of a network with BatchNorm, at a learning rate that changes with each
    step and each epoch.
    """

    def __init__(self, seed: int = 3) -> None:
        self.net = network(norm=True, seed=seed)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 0.05)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.rates: list[float] = []
        self.shown: list[Tensor] = []

    def epoch(self, batches: Any, show: Callable[[], object], net: nn.Module | None = None) -> None:
        net = self.net if net is None else net
        for (batch,) in batches:
            loss_of(net(batch)).backward()
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
        show()
        self.shown.append(
            torch.cat([value.double().reshape(-1) for value in self.net.state_dict().values()])
        )


def in_one_process(num_workers: int, epochs: Sequence[int], loop: Loop) -> Loop:
    """The steps with the mean over the workers, each of which has BatchNorm's statistics of its
    own batches.
    """
    replicas = [loop.net, *(copy.deepcopy(loop.net) for _ in range(num_workers - 1))]
    for epoch in epochs:
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        for begin in range(0, NUM_SAMPLES // num_workers, BATCH_SIZE):
            for rank, replica in enumerate(replicas):
                replica.zero_grad()
                mine = order[rank::num_workers][begin : begin + BATCH_SIZE]
                loss_of(replica(samples()[mine][0])).backward()
            for same in zip(*(replica.parameters() for replica in replicas), strict=True):
                total = same[0].grad.clone()
                for other in same[1:]:
                    total += other.grad
                same[0].grad = total / num_workers
            loop.optimizer.step()
            loop.schedule.step()
            for replica in replicas[1:]:
                with torch.no_grad():
                    for mine, first in zip(
                        replica.parameters(), loop.net.parameters(), strict=True
                    ):
                        mine.copy_(first)
        for replica in replicas[1:]:
            replica.load_state_dict(loop.net.state_dict())
        loop.shown.append(
            torch.cat([value.double().reshape(-1) for value in loop.net.state_dict().values()])
        )
    return loop


def run_with(
    algorithm: Any, epochs: range, loop: Loop | None = None, state: Any = None
) -> tuple[Loop, Any]:
    loop = loop or Loop()
    with distribute(loop.net, loop.optimizer, algorithm=algorithm) as training:
        if state is not None:
            training.load_optimizer_state_dict(loop.optimizer, state)
        sampler = training.sampler(samples())
        for epoch in epochs:
            sampler.set_epoch(epoch)
            batches = DataLoader(samples(), BATCH_SIZE, sampler=sampler)
            each = -(-NUM_SAMPLES // training.num_workers)
            assert len(batches) == (
                -(-each // BATCH_SIZE) if training.rank < training.num_workers else 0
            )
            loop.epoch(batches, training.show_averages)
            assert_all_ranks_equal(loop.shown[-1])
            evaluated = training.all_reduce(torch.tensor(float(RANK)), "sum")
            assert evaluated == sum(range(SIZE))
        saved = training.optimizer_state_dict(loop.optimizer)
        assert bool(saved) == (RANK == 0 or algorithm == "ring")
    return loop, saved


def check_bulk_has_the_bits_of_a_job_of_the_workers_and_resumes_elsewhere() -> None:
    expected = in_one_process(SIZE - NUM_SERVERS, range(3), Loop())
    loop, saved = run_with(server(), range(3))
    for found, one in zip(loop.shown, expected.shown, strict=True):
        assert torch.equal(found, one)
    assert len(loop.rates) == (0 if RANK >= SIZE - NUM_SERVERS else 3 * 16 // (SIZE - NUM_SERVERS))
    saved = MPI.COMM_WORLD.bcast(saved)
    assert torch.equal(
        saved["state"][0]["exp_avg"], expected.optimizer.state_dict()["state"][0]["exp_avg"]
    )
    # on every rank, at the end
    assert loop.optimizer.state_dict()["state"].keys() == saved["state"].keys()

    halfway, saved = run_with(server(), range(2))
    saved, schedule = MPI.COMM_WORLD.bcast((saved, halfway.schedule.state_dict()))
    again = Loop(seed=9)  # what is loaded replaces it
    again.net.load_state_dict(halfway.net.state_dict())
    again.schedule.load_state_dict(schedule)
    resumed, _ = run_with(server(), range(2, 3), again, saved)
    assert torch.equal(resumed.shown[-1], loop.shown[-1])
    elsewhere = Loop(seed=9)
    elsewhere.net.load_state_dict(halfway.net.state_dict())
    run_with("ring", range(2, 3), elsewhere, saved)


def check_every_step_of_workers_with_different_numbers_of_batches_counts() -> None:
    for mode, how in (("async", {"delay_compensation": 0.04}), ("stale", {"staleness": 1})):
        net = network()
        optimizer = torch.optim.AdamW(net.parameters(), 0.01)
        counts = []
        with distribute(net, optimizer, algorithm=server(mode, **how)) as training:
            serves = training.num_workers <= RANK
            for epoch in range(2):
                number = 0 if serves else (3, 7, 5)[(RANK + epoch) % 3]
                for _ in range(number):
                    loss_of(net(torch.randn(8, 6))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                counts.append(number)
                if mode == "async":  # any collective may come first: servers have no batch by then
                    assert training.all_reduce(torch.tensor(1), "sum") == SIZE
                training.show_averages()
                assert_all_ranks_equal(parameters(net))
        total = MPI.COMM_WORLD.allreduce(sum(counts))
        assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {
            float(total)
        }
        assert_all_ranks_equal(parameters(net))


def check_fabric_divides_its_loaders_over_the_workers(tmp_path: Path) -> None:
    # of seed_everything in a check before: Fabric's samplers would take it
    os.environ.pop("PL_GLOBAL_SEED", None)
    path = MPI.COMM_WORLD.bcast(str(tmp_path / "saved.ckpt"))
    expected = in_one_process(SIZE - NUM_SERVERS, (0, 0), Loop())  # orders of new loaders
    for seed, epochs in ((3, range(1)), (9, range(1, 2))):
        loop, fabric = (
            Loop(seed),
            ring(RingFabricStrategy(algorithm=server()), callbacks=[LoopMonitor(1)]),
        )
        model, loop.optimizer = fabric.setup(loop.net, loop.optimizer)
        batches = fabric.setup_dataloaders(DataLoader(samples(), BATCH_SIZE, shuffle=True))
        everybody = torch.utils.data.DistributedSampler(samples(), SIZE, RANK, shuffle=False)
        assert len(fabric.setup_dataloaders(DataLoader(samples(), 1, sampler=everybody))) == -(
            -NUM_SAMPLES // SIZE
        )
        state = {"model": model, "optimizer": loop.optimizer, "schedule": loop.schedule}
        if epochs[0] > 0:
            fabric.load(path, state)
        for epoch in epochs:
            loop.epoch(batches, fabric.strategy.show_averages, model)  # type: ignore[attr-defined]
            assert torch.equal(loop.shown[-1], expected.shown[epoch])
        fabric.save(path, state)
        fabric.strategy.teardown()


def check_what_cannot_work_is_refused_on_every_rank() -> None:
    with pytest.raises(
        ConfigurationError,
        match=rf"servers={SIZE} with dedicated=True, and the job has {SIZE} rank",
    ):
        distribute(network(), algorithm=ParameterServer(SIZE, dedicated=True))
    with pytest.raises(
        ConfigurationError, match=r"under a Trainer, .* Use lightning_ring.distribute or Fabric"
    ):
        trainer(RingStrategy(algorithm=server())).fit(Classifier(), loader())
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with distribute(net, optimizer, algorithm=server("async")):
        loss_of(net(torch.ones(2, 6))).backward()
        if RANK < SIZE - NUM_SERVERS:
            optimizer.step()
        else:
            with pytest.raises(
                ConfigurationError, match=f"rank {RANK} is a server of .* training.num_workers"
            ):
                optimizer.step()


def check_what_is_loaded_behind_the_servers_back_is_an_error() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    loss_of(net(torch.ones(2, 6))).backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    with distribute(net, optimizer, algorithm=server("async")) as training:
        optimizer.load_state_dict(saved)
        if RANK < SIZE - NUM_SERVERS:
            with pytest.raises(
                RingError, match=r"state was replaced, .* training.load_optimizer_state_dict"
            ):
                optimizer.step()
        training.load_optimizer_state_dict(optimizer, saved)
        if RANK < SIZE - NUM_SERVERS:
            optimizer.step()
