"""`ParameterServer` against its formulas in one process. Ranks are threads, but for the last test."""

from __future__ import annotations

import copy
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from lightning_ring import RingStrategy
from lightning_ring.algorithms.server import ParameterServer
from lightning_ring.algorithms.server.layout import layouts, write_
from lightning_ring.algorithms.server.shard import Push, Shard, _average
from lightning_ring.algorithms.server.twin import Twin, settings_of
from lightning_ring.errors import CollectiveError, ConfigurationError, RingError
from lightning_ring.optim import LARS
from tests.algorithms.test_local import loss
from tests.algorithms.test_local import network as new_network
from tests.battery import check_names
from tests.processes import run
from tests.thread_ranks import run_ranks

MODULE = "tests.checks.server"
NUM_STEPS = 7
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda net: SGD(net.parameters(), 0.05, momentum=0.9),
    "adamw": lambda net: AdamW([{"params": [*net.parameters()][:2], "lr": 0.02}, {"params": [*net.parameters()][2:]}]),
    "lars": lambda net: LARS(net.parameters(), 0.5, momentum=0.9),  # norms of whole tensors
    "adafactor": lambda net: Adafactor(net.parameters(), 0.05),  # rows and columns of whole tensors
}


START = new_network()  # once: threads that seed torch disturb each other


def network() -> nn.Module:
    return copy.deepcopy(START)


def one_step(net: nn.Module, optimizer: Optimizer, algorithm: ParameterServer, rank: int, step: int) -> None:
    algorithm.begin_batch()
    value = loss(net, rank, step)
    value.backward()
    algorithm.before_step(optimizer, has_closure=False)
    optimizer.step()
    algorithm.after_step(optimizer)
    optimizer.zero_grad()


def vector(net: nn.Module) -> Tensor:
    return parameters_to_vector(net.parameters()).detach().clone()


def sequential(optimizer: str, world_size: int, lr: Callable[[int], float] | None = None) -> tuple[Tensor, Any]:
    """One process that steps the mean of all ranks' gradients."""
    net = network()
    steps = OPTIMIZERS[optimizer](net)
    for step in range(NUM_STEPS):
        steps.zero_grad()
        (torch.stack([loss(net, rank, step) for rank in range(world_size)]).sum() / world_size).backward()
        steps.step()
        if lr is not None:
            steps.param_groups[0]["lr"] = lr(step)
    return vector(net), steps.state_dict()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("servers", [None, 1, 2])
def test_bulk_is_the_step_with_the_mean_in_one_process(world_size: int, optimizer: str, servers: int | None) -> None:
    def rank(comm: Any) -> tuple[Tensor, Any, Any]:
        net, algorithm = network(), ParameterServer(servers)
        steps = OPTIMIZERS[optimizer](net)
        algorithm.attach(net, [steps], comm)
        for step in range(NUM_STEPS):
            one_step(net, steps, algorithm, comm.rank, step)
            steps.param_groups[0]["lr"] = 0.01 * (step + 1)
            for _ in range(step % 3):  # nothing changes in between
                algorithm.show_averages()
        saved = algorithm.optimizer_state_dict(steps, is_rank_zero=comm.rank == 0)
        with pytest.raises(ConfigurationError, match="is with the parameter servers"):
            steps.state_dict()
        algorithm.detach()
        return vector(net), saved, steps.state_dict()

    found = run_ranks(world_size, rank)
    expected, state = sequential(optimizer, world_size, lambda step: 0.01 * (step + 1))
    for weights, _, after in found:
        assert torch.equal(weights, found[0][0])
        torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(after["state"], state["state"], rtol=1e-4, atol=1e-6)
    assert found[1][1] == {}
    assert found[0][1]["param_groups"] == state["param_groups"]
    torch.testing.assert_close(found[0][1]["state"], state["state"], rtol=1e-4, atol=1e-6)


def shard_of(num_workers: int, **how: Any) -> tuple[Shard, list[Tensor]]:
    """A server of one parameter, and where a worker's weights go."""
    weight = nn.Parameter(torch.linspace(-1, 1, 6, dtype=torch.float64))
    layout = layouts([weight], 1, cut=True)[0]
    shard = Shard(Twin(SGD([weight], 0.1), [weight], layout), num_workers, **how)
    return shard, shard.weights()


SETTINGS = settings_of(SGD([nn.Parameter(torch.zeros(1))], 0.1))


@pytest.mark.parametrize("how", [{}, {"staleness": 10}])
@pytest.mark.parametrize("compensation", [None, 0.3])
def test_delay_compensation_is_equation_10_of_the_paper(compensation: float | None, how: dict[str, Any]) -> None:
    """w ← w - lr · (g + λ g ⊙ g ⊙ (w - w_r)), for pushes that come in an order of their own; three workers."""
    shard, pulled = shard_of(3, compensation=compensation, **how)
    weights = torch.linspace(-1, 1, 6, dtype=torch.float64).numpy()
    seen = [weights.copy() for _ in range(3)]
    generator = torch.Generator().manual_seed(1)
    order = [0, 1, 1, 0, 2, 1, 2, 2, 0]
    last = [0, 0, 0]
    for number, worker in enumerate(order):
        gradient = torch.randn(6, dtype=torch.float64, generator=generator)
        delay = shard.push(worker, Push([gradient.clone()], SETTINGS), pulled)
        g = gradient.numpy()
        weights = weights - 0.1 * (g + (compensation or 0.0) * g * g * (weights - seen[worker]))
        seen[worker] = weights.copy()
        assert delay == number - last[worker]
        last[worker] = number + 1
        torch.testing.assert_close(pulled[0], torch.from_numpy(weights), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_no_worker_is_more_than_the_bound_ahead(staleness: int) -> None:
    shard, _ = shard_of(2, staleness=staleness)
    clocks, ahead = [0, 0], []

    def fast() -> None:
        pulled = shard.weights()
        for _ in range(12):
            shard.push(0, Push([torch.zeros(6, dtype=torch.float64)], SETTINGS), pulled)
            clocks[0] += 1
            ahead.append(clocks[0] - clocks[1])

    thread = threading.Thread(target=fast, daemon=True)
    thread.start()
    pulled = shard.weights()
    for step in range(12):
        if step < 4:
            time.sleep(0.05)
        clocks[1] += 1  # the fast one may see the push before this thread comes back from it
        shard.push(1, Push([torch.zeros(6, dtype=torch.float64)], SETTINGS), pulled)
    thread.join(10)
    assert not thread.is_alive()
    assert max(ahead) <= staleness
    assert max(ahead[:4]) == staleness  # it did run ahead


def test_a_gradient_that_some_ranks_lack_counts_as_zero_there() -> None:
    gradient = torch.tensor([3.0, 6.0])
    for dtype in (torch.float32, torch.bfloat16):
        mean = _average([None, gradient.to(dtype), None])
        assert mean is not None
        assert mean.dtype == dtype
        assert mean.tolist() == [1.0, 2.0]
    assert _average([None, None]) is None


def test_a_worker_that_rests_holds_nobody_up() -> None:
    shard, pulled = shard_of(2, staleness=1)
    shard.rest(1)
    for _ in range(5):
        shard.push(0, Push([torch.zeros(6, dtype=torch.float64)], SETTINGS), pulled)
    assert shard.num_updates == 5
    shard.meet()
    shard.push(0, Push([torch.zeros(6, dtype=torch.float64)], SETTINGS), pulled)  # the bound counts from here


def test_parameters_are_cut_into_equal_parts_or_spread_whole() -> None:
    params = [torch.zeros(3, 5), torch.zeros(7), torch.zeros(0), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(1)]
    for num_servers in (1, 2, 3, 5, 40):
        for cut in (True, False):
            parts = layouts(params, num_servers, cut=cut)
            covered = [
                (piece.index, i) for part in parts for piece in part.pieces for i in range(piece.start, piece.stop)
            ]
            assert sorted(covered) == [(n, i) for n, param in enumerate(params) for i in range(param.numel())]
            sizes = [
                sum((piece.stop - piece.start) * params[piece.index].itemsize for piece in part.pieces)
                for part in parts
            ]
            if cut:
                assert max(sizes) - min(sizes) <= 16  # where two dtypes meet
    last = torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    values = torch.arange(last.numel(), dtype=torch.float32)
    write_([last], [(piece, piece.of(values)) for part in layouts([last], 3, cut=True) for piece in part.pieces])
    assert torch.equal(last.reshape(-1), values)


def test_a_closure_an_unused_and_a_thawed_parameter() -> None:
    """As one process does it: an unused parameter keeps its value, and a thawed one is trained from then on."""

    def trained(algorithm: ParameterServer | None, comm: Any) -> Tensor:
        net = network()
        net.extra = nn.Parameter(torch.ones(2))
        net[0].bias.requires_grad_(False)
        steps = SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.1)
        ranks = range(2) if comm is None else [comm.rank]
        if algorithm is not None:
            algorithm.attach(net, [steps], comm)
        for step in range(6):
            if step == 3:
                net[0].bias.requires_grad_(True)
            if algorithm is not None:
                algorithm.begin_batch()
                algorithm.before_step(steps, has_closure=True)

            def closure(step: int = step) -> Tensor:
                steps.zero_grad()
                value = torch.stack([loss(net[:3], rank, step) for rank in ranks]).mean()
                value.backward()
                return value

            assert steps.step(closure) is not None
            if algorithm is not None:
                algorithm.after_step(steps)
        if algorithm is not None:
            algorithm.detach()
        assert len(steps.state) == 4
        return vector(net)

    expected = trained(None, None)
    for found in run_ranks(2, lambda comm: trained(ParameterServer(), comm)):
        torch.testing.assert_close(found, expected)
        assert torch.equal(found[:2], torch.ones(2))  # the extra one comes first


@pytest.mark.parametrize("mode", ["async", "stale"])
def test_ranks_with_different_numbers_of_steps_end_with_the_same_weights(mode: Any) -> None:
    """Each has its epochs, after which all show the servers' weights; one rank has no batch in the second."""

    def rank(comm: Any) -> list[Tensor]:
        net, algorithm = network(), ParameterServer(mode=mode)
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        shown = []
        for batches in ((3, 9, 5), (4, 0, 2)):
            for step in range(batches[comm.rank]):
                one_step(net, steps, algorithm, comm.rank, step)
            algorithm.show_averages()
            shown.append(vector(net))
        algorithm.detach()
        return shown

    found = run_ranks(3, rank)
    for shown in zip(*found, strict=True):
        assert all(torch.equal(each, shown[0]) for each in shown)
    assert not torch.equal(found[0][0], found[0][1])


def test_a_rank_without_a_batch_is_an_error_in_bulk_mode() -> None:
    def rank(comm: Any) -> None:
        net, algorithm = network(), ParameterServer()
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        for step in range(3 + comm.rank):
            one_step(net, steps, algorithm, comm.rank, step)
        algorithm.show_averages()

    with pytest.raises(CollectiveError, match="rank 1 took a step, while rank 0 had ended its epoch"):
        run_ranks(2, rank)


@pytest.mark.parametrize("mode", ["bulk", "stale", "async"])
def test_a_request_to_stop_is_met_by_all_ranks(mode: Any) -> None:
    """Also while one rank is already at the end of its epoch, where nobody can stop: at the next step of all."""

    def rank(comm: Any) -> list[tuple[int, int]]:
        net, algorithm = network(), ParameterServer(mode=mode)
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        stops = []
        for epoch, batches in enumerate(((6, 6), (2, 6), (6, 6)) if mode != "bulk" else ((6, 6),) * 3):
            for step in range(batches[comm.rank]):
                if algorithm.agreed_to_stop():
                    stops.append((epoch, step))
                    comm.barrier()  # what the strategy does then is collective
                if (epoch, step, comm.rank) == (1, 4, 1):
                    algorithm.ask_to_stop()
                one_step(net, steps, algorithm, comm.rank, step)
                algorithm.ask_to_stop(False)
            algorithm.show_averages()
        algorithm.detach()
        return stops

    found = run_ranks(2, rank)
    if mode == "bulk":
        assert found == [[(1, 5)], [(1, 5)]]
    else:  # rank 0 learns of it with its next step
        assert found in ([[(2, 0)], [(2, 0)]], [[(2, 1)], [(2, 0)]])


def test_changes_by_other_code_are_an_error() -> None:
    def rank(comm: Any) -> None:
        net, algorithm = network(), ParameterServer()
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        one_step(net, steps, algorithm, comm.rank, 0)
        with torch.no_grad():
            net[0].bias.clamp_(-0.1, 0.1)
        one_step(net, steps, algorithm, comm.rank, 1)

    with pytest.raises(RingError, match="parameters were changed since the last step"):
        run_ranks(2, rank)


def test_an_error_of_the_servers_optimizer_is_told_to_every_rank() -> None:
    class Failing(SGD):
        def step(self, closure: Any = None) -> Any:
            if any(param.grad is not None for param in self.param_groups[0]["params"]):
                raise ValueError("no such step")

    def rank(comm: Any) -> str:
        net, algorithm = network(), ParameterServer(1)
        steps = Failing(net.parameters(), 0.1)
        algorithm.attach(net, [steps], comm)
        with pytest.raises(CollectiveError) as error:
            one_step(net, steps, algorithm, comm.rank, 0)
        algorithm.detach(wait=False)
        return str(error.value)

    assert run_ranks(2, rank) == 2 * ["rank 0 answers: ValueError: no such step"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ParameterServer(0), "servers=0"),
        (lambda: ParameterServer(mode="sync"), "mode='sync', expected one of 'bulk', 'stale', 'async'"),  # type: ignore[arg-type]
        (lambda: ParameterServer(staleness=2), "staleness=2 with mode='bulk'"),
        (lambda: ParameterServer(mode="async", staleness=2), "staleness=2 with mode='async'"),
        (lambda: ParameterServer(mode="stale", staleness=-1), "staleness=-1"),
        (lambda: ParameterServer(delay_compensation=0.1), "delay_compensation=0.1 with mode='bulk'"),
        (lambda: ParameterServer(mode="async", delay_compensation=0), "delay_compensation=0, expected a number above"),
        (lambda: RingStrategy(algorithm=ParameterServer(), uneven="join"), "uneven='join' with algorithm=Parameter"),
        (
            lambda: RingStrategy(algorithm=ParameterServer(), elastic=True),
            "elastic=True, .*ParameterServer keeps state",
        ),
        (lambda: RingStrategy(algorithm=ParameterServer(), compression="int8"), "compression beside algorithm=Param"),
        (lambda: RingStrategy(algorithm=ParameterServer(), shard_optimizer=True), "shard_optimizer beside algorithm="),
        (
            lambda: RingStrategy(algorithm=ParameterServer(mode="async"), broadcast_buffers="step"),
            "broadcast_buffers='step' with algorithm=ParameterServer",
        ),
        (lambda: attached(ParameterServer(3)), "servers=3, and the job has 2"),
        (lambda: attached(ParameterServer(), 2), "ParameterServer got 2 optimizers"),
        (lambda: attached(ParameterServer(), kind=torch.optim.LBFGS), "optimizer LBFGS, which asks for gradients"),
        (lambda: attached(ParameterServer(), kind=torch.optim.SparseAdam), "SparseAdam, which takes sparse gradients"),
        (lambda: ParameterServer().clip_grad_norm_([], 1.0), "clipped by their norm, but ParameterServer.mode='bulk'"),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def attached(algorithm: ParameterServer, num_optimizers: int = 1, kind: Any = SGD) -> None:
    def rank(comm: Any) -> None:
        net = network()
        algorithm.attach(net, [kind(net.parameters(), 0.1) for _ in range(num_optimizers)], comm)

    run_ranks(2, rank)


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_real_ranks(battery: Any, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check)


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "victim"), [("bulk", 0), ("async", 1)])
def test_a_killed_rank_ends_the_job(mode: str, victim: int, tmp_path: Path) -> None:
    """The only server, and a worker that nobody waits for."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal, time, torch\n"
        "from lightning_ring import distribute\n"
        "from lightning_ring.algorithms.server import ParameterServer\n"
        "net = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        f"with distribute(net, optimizer, algorithm=ParameterServer(1, {mode!r})) as training:\n"
        "    for step in range(1000):\n"
        f"        if step == 3 and training.rank == {victim}:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        net(torch.ones(1, 2)).sum().backward()\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
        "        time.sleep(0.01)\n"
        "print('the end')\n"
    )
    done = run([sys.executable, "-m", "lightning_ring.cli.ringrun", "--no-mpi", "-n", "3", str(script)], timeout=100)
    assert done.returncode == 137, done.stdout
    assert "the end" not in done.stdout
    assert f"rank {victim} (host" in done.stdout
