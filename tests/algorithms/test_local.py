"""`LocalSGD` and `DiLoCo` against their formulas in one process. Ranks are threads, but for the last test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, AdamW, Optimizer

from lightning_ring import RingStrategy
from lightning_ring.algorithms.local import DiLoCo, LocalSGD
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression.between_nodes import BetweenNodes
from tests.battery import check_names
from tests.thread_ranks import run_ranks

MODULE = "tests.checks.local_steps"
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda net: SGD(net.parameters(), 0.05, momentum=0.9),
    "adamw": lambda net: AdamW(net.parameters(), 0.01),
}
NUM_STEPS = 11


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))


def loss(net: nn.Module, rank: int, step: int) -> Tensor:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + rank))
    return (net(inputs) - 0.5).square().mean()


def one_step(net: nn.Module, optimizer: Optimizer, algorithm: LocalSGD, rank: int) -> None:
    algorithm.begin_batch()
    with algorithm.forward():
        value = loss(net, rank, algorithm.num_steps)
    with algorithm.backward():
        value.backward()
    algorithm.before_step(optimizer, has_closure=False)
    optimizer.step()
    algorithm.after_step(optimizer)
    optimizer.zero_grad()


def trained(world_size: int, algorithm: LocalSGD, optimizer: str, num_steps: int = NUM_STEPS) -> list[list[Tensor]]:
    """Each rank's parameters after each step."""
    start = network()

    def rank(comm: Any) -> list[Tensor]:
        net, own = copy.deepcopy(start), copy.deepcopy(algorithm)
        steps = OPTIMIZERS[optimizer](net)
        own.attach(net, [steps], comm)
        found = []
        for _ in range(num_steps):
            one_step(net, steps, own, comm.rank)
            found.append(parameters_to_vector(net.parameters()).detach().clone())
        own.detach()
        return found

    return run_ranks(world_size, rank)


def reference(
    world_size: int,
    optimizer: str,
    *,
    every: int,
    warmup: int = 0,
    average_optimizer: bool = False,
    outer: tuple[float, float] | None = None,
) -> list[list[Tensor]]:
    """The formulas of the papers, over copies of the network in one process."""
    nets = [network() for _ in range(world_size)]
    optimizers = [OPTIMIZERS[optimizer](net) for net in nets]
    anchor = [p.detach().clone() for p in nets[0].parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    found: list[list[Tensor]] = [[] for _ in nets]
    for step in range(NUM_STEPS):
        for rank, (net, steps) in enumerate(zip(nets, optimizers, strict=True)):
            steps.zero_grad()
            loss(net, rank, step).backward()
        columns = list(zip(*(net.parameters() for net in nets), strict=True))
        if step < warmup:
            for column in columns:
                mean = torch.stack([p.grad for p in column]).mean(0)
                for p in column:
                    p.grad = mean.clone()
        for steps in optimizers:
            steps.step()
        with torch.no_grad():
            if step + 1 == warmup:
                anchor = [p.detach().clone() for p in nets[0].parameters()]
            if step >= warmup and (step + 1 - warmup) % every == 0:
                for index, column in enumerate(columns):
                    new = torch.stack(column).mean(0)
                    if outer is not None:
                        change = anchor[index] - new
                        velocity[index] = outer[1] * velocity[index] + change
                        new = anchor[index] = anchor[index] - outer[0] * (change + outer[1] * velocity[index])
                    for p in column:
                        p.copy_(new)
                    if average_optimizer:
                        states = [steps.state[p] for steps, p in zip(optimizers, column, strict=True)]
                        for key in [key for key, value in states[0].items() if value.shape == column[0].shape]:
                            mean = torch.stack([state[key] for state in states]).mean(0)
                            for state in states:
                                state[key].copy_(mean)
        for rank, net in enumerate(nets):
            found[rank].append(parameters_to_vector(net.parameters()).detach().clone())
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (LocalSGD(3), {"every": 3}),
        (LocalSGD(4, warmup_steps=3), {"every": 4, "warmup": 3}),
        (LocalSGD(2, average_optimizer=True), {"every": 2, "average_optimizer": True}),
        (DiLoCo(3), {"every": 3, "outer": (0.7, 0.9)}),
        (DiLoCo(4, 0.5, 0.0, warmup_steps=2), {"every": 4, "warmup": 2, "outer": (0.5, 0.0)}),
    ],
    ids=["local", "post-local", "averaged state", "diloco", "diloco after a warm-up"],
)
def test_equals_the_formula_in_one_process(
    world_size: int, optimizer: str, algorithm: LocalSGD, settings: dict[str, Any]
) -> None:
    found = trained(world_size, algorithm, optimizer)
    for ours, theirs in zip(found, reference(world_size, optimizer, **settings), strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-6)


def streaming_reference(
    world_size: int, *, every: int, warmup: int, fragments: list[list[int]], overlap: int, share: float, bits: int
) -> list[list[Tensor]]:
    """Algorithm 2 of Streaming DiLoCo in NumPy, with SGD of learning rate 0.05 and momentum 0.9 as inner optimizer.

    ``fragments``: the numbers of their parameters. The gradients are torch's.
    """
    nets = [network() for _ in range(world_size)]
    w = [[p.detach().numpy() for p in net.parameters()] for net in nets]  # share the networks' memory
    inner = [[np.zeros_like(value) for value in own] for own in w]
    anchor, velocity = [value.copy() for value in w[0]], [np.zeros_like(value) for value in w[0]]
    under_way: dict[int, list[np.ndarray]] = {}
    found: list[list[Tensor]] = [[] for _ in nets]
    for step in range(1, NUM_STEPS + 1):
        gradients = []
        for rank, net in enumerate(nets):
            net.zero_grad()
            loss(net, rank, step - 1).backward()
            gradients.append([p.grad.numpy() for p in net.parameters()])
        for rank in range(world_size):
            for value, gradient, momentum, all_ranks in zip(
                w[rank], gradients[rank], inner[rank], zip(*gradients, strict=True), strict=True
            ):
                momentum[:] = 0.9 * momentum + (np.mean(all_ranks, 0) if step <= warmup else gradient)
                value -= np.float32(0.05) * momentum
        if step == warmup:
            anchor = [value.copy() for value in w[0]]
        local = step - warmup
        for number, members in enumerate(fragments):
            ends = (number + 1) * every // len(fragments)
            if local >= ends and (local - ends) % every == 0:
                flat = [np.concatenate([(anchor[m] - own[m]).ravel() for m in members]) for own in w]
                mean = two_legs(flat, bits)
                cuts = np.cumsum([anchor[m].size for m in members])[:-1]
                under_way[number] = np.split(mean, cuts)
            if local >= ends + overlap and (local - ends - overlap) % every == 0:
                for m, change in zip(members, under_way.pop(number), strict=True):
                    change = change.reshape(anchor[m].shape)
                    velocity[m] = 0.9 * velocity[m] + change
                    anchor[m] = anchor[m] - 0.7 * (change + 0.9 * velocity[m])
                    for own in w:
                        own[m][...] = share * own[m] + (1 - share) * anchor[m]
        for rank, own in enumerate(w):
            found[rank].append(torch.from_numpy(np.concatenate([value.ravel() for value in own])))
    return found


def two_legs(values: list[np.ndarray], bits: int) -> np.ndarray:
    """The average of the ranks' vectors; each shard's messages to its owner and back are rounded."""
    shards = [np.array_split(own, len(values)) for own in values]
    return np.concatenate(
        [rounded(np.mean([rounded(own[owner], bits) for own in shards], 0), bits) for owner in range(len(values))]
    )


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """To 8 bits, or to 4 in E3M0, in blocks of 256 with the scale of the largest."""
    out = values.copy()
    for start in range(0, len(values), 256) if bits < 32 else ():
        block = values[start : start + 256]
        largest = np.abs(block).max()
        if bits == 8:
            out[start : start + 256] = np.round(block * (127 / largest)) * (largest / 127)
        else:
            levels = largest * np.array([0, *(2.0 ** -np.arange(7))])
            nearest = np.abs(np.abs(block)[:, None] - levels).argmin(1)
            out[start : start + 256] = np.sign(block) * levels[nearest]
    return out


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (DiLoCo(4, fragments=2), {"every": 4, "fragments": [[0], [1, 2, 3]], "overlap": 0, "share": 0}),
        (DiLoCo(5, overlap=2), {"every": 5, "fragments": [[0, 1, 2, 3]], "overlap": 2, "share": 0.5}),
        (
            DiLoCo(4, fragments=3, overlap=3, own_share=0.25, warmup_steps=2, outer_bits=4),
            {"every": 4, "warmup": 2, "fragments": [[0], [1], [2, 3]], "overlap": 3, "share": 0.25, "bits": 4},
        ),
        (DiLoCo(3, outer_bits=8), {"every": 3, "fragments": [[0, 1, 2, 3]], "overlap": 0, "share": 0, "bits": 8}),
    ],
    ids=["fragments", "overlap", "all of it in 4 bits", "8 bits"],
)
def test_equals_the_formula_of_streaming_diloco(world_size: int, algorithm: DiLoCo, settings: dict[str, Any]) -> None:
    if isinstance(algorithm._compressor, BetweenNodes):
        algorithm._compressor.min_numel = 0  # the network has 66 parameters
    found = trained(world_size, algorithm, "sgd")
    expected = streaming_reference(world_size, **({"warmup": 0, "bits": 32} | settings))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(4),
        lambda: LocalSGD(4, warmup_steps=5),
        lambda: DiLoCo(4),
        lambda: DiLoCo(4, fragments=2, overlap=3, outer_bits=8),
    ],
)
def test_averages_are_shown_without_a_trace_and_a_round_is_resumed_exactly(make: Callable[[], LocalSGD]) -> None:
    """After each of the first 7 steps averages are shown, and a checkpoint is written; another job goes on from it."""
    straight = trained(3, make(), "adamw")
    start = network()

    def rank(comm: Any) -> list[tuple[Tensor, list[Tensor]]]:
        net, algorithm = copy.deepcopy(start), make()
        steps = OPTIMIZERS["adamw"](net)
        algorithm.attach(net, [steps], comm)
        found = []
        for step in range(7):
            one_step(net, steps, algorithm, comm.rank)
            algorithm.show_averages()
            algorithm.show_averages()  # once is enough
            shown = parameters_to_vector(net.parameters()).detach().clone()
            state = comm.broadcast_object(algorithm.state_dict())  # from a file of rank 0's
            other, resumed = copy.deepcopy(net), make()
            again = OPTIMIZERS["adamw"](other)
            resumed.attach(other, [again], comm)
            again.load_state_dict(comm.broadcast_object(copy.deepcopy(steps.state_dict())))  # rank 0's, as Lightning
            assert resumed.load_state_dict(state) == ""
            for _ in range(step + 1, NUM_STEPS):
                one_step(other, again, resumed, comm.rank)
            resumed.detach()
            found.append((shown, [parameters_to_vector(other.parameters()).detach()]))
        algorithm.detach()
        return found

    by_rank = run_ranks(3, rank)
    for step in range(7):
        mean = torch.stack([own[step] for own in straight]).mean(0)
        for own, results in zip(straight, by_rank, strict=True):
            shown, (end,) = results[step]
            torch.testing.assert_close(shown, mean, rtol=1e-5, atol=1e-7)
            assert torch.equal(shown, by_rank[0][step][0])
            assert torch.equal(end, own[-1]), step


def test_another_number_of_ranks_goes_on_from_the_average() -> None:
    def save(comm: Any) -> dict[str, Any]:
        net, algorithm = network(), LocalSGD(4)
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        for _ in range(6):
            one_step(net, steps, algorithm, comm.rank)
        return algorithm.state_dict()

    state = run_ranks(3, save)[0]

    def load(comm: Any) -> tuple[str, int, Tensor]:
        net, algorithm = network(), LocalSGD(4)
        before = parameters_to_vector(net.parameters()).detach().clone()
        algorithm.attach(net, [OPTIMIZERS["sgd"](net)], comm)
        message = algorithm.load_state_dict(state)
        assert torch.equal(parameters_to_vector(net.parameters()), before)  # the checkpoint's averages
        return message, algorithm.num_steps, before

    message, num_steps, _ = run_ranks(2, load)[0]
    assert "after 6 steps of 3 ranks, and this job has 2" in message
    assert num_steps == 4


def test_parameters_that_are_thawed_within_a_round() -> None:
    def rank(comm: Any) -> Tensor:
        net, algorithm = network(), DiLoCo(3)
        net[0].requires_grad_(False)
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        for step in range(6):
            one_step(net, steps, algorithm, comm.rank)
            if step == 1:
                algorithm.show_averages()
                net[0].requires_grad_(True)
        return parameters_to_vector(net.parameters()).detach()

    first, other = run_ranks(2, rank)
    assert torch.equal(first, other)
    assert not torch.equal(first, parameters_to_vector(network().parameters()))


def test_a_request_to_stop_reaches_every_rank_at_the_end_of_a_round() -> None:
    def rank(comm: Any) -> list[bool]:
        net, algorithm = network(), LocalSGD(3, warmup_steps=1)
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        answers = []
        for step in range(8):
            if step == 5 and comm.rank == 1:
                algorithm.ask_to_stop()
            one_step(net, steps, algorithm, comm.rank)
            answers.append(algorithm.agreed_to_stop())
        return answers

    assert run_ranks(2, rank) == 2 * [[False] * 6 + [True, False]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(0), "every=0"),
        (lambda: LocalSGD(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: LocalSGD(compression="bf16"), "compression='bf16' with warmup_steps=0"),
        (lambda: DiLoCo(outer_momentum=1), "outer_momentum=1"),
        (lambda: DiLoCo(outer_lr=0), "outer_lr=0"),
        (lambda: DiLoCo(4, fragments=5), "every=4, fragments=5"),
        (lambda: DiLoCo(4, overlap=4), "overlap=4"),
        (lambda: DiLoCo(own_share=1), "own_share=1"),
        (lambda: DiLoCo(outer_bits=16), "outer_bits=16"),
        (lambda: RingStrategy(algorithm=LocalSGD(), uneven="join"), "uneven='join' with algorithm=LocalSGD"),
        (lambda: RingStrategy(algorithm="ring_local", uneven="join"), "uneven='join' with algorithm='ring_local'"),
        (lambda: RingStrategy(algorithm="ring_local", compression="int8"), "compression='int8' with algorithm="),
        (lambda: RingStrategy(algorithm="ring_local", elastic=True), "LocalSGD keeps state of its ranks"),
        (lambda: RingStrategy(algorithm="ring_local", shard_optimizer=True), "shard_optimizer=True with algorithm="),
    ],
)
def test_what_cannot_work_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_the_names_of_the_strategy() -> None:
    algorithm = RingStrategy(algorithm="ring_local").options.new_algorithm()
    assert isinstance(algorithm, LocalSGD)
    assert algorithm.every == 8


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize("world_size", [2, 3])
def test_on_real_ranks(battery: Any, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check)
