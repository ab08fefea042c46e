"""`Gossip` against its formula in one process. Ranks are threads."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from lightning_ring.algorithms.local import Gossip
from lightning_ring.errors import ConfigurationError
from tests.algorithms.local_training import OPTIMIZERS, loss, network, one_step
from tests.thread_ranks import run_ranks

NUM_STEPS = 9


def weights(topology: str, world_size: int, steps: int) -> list[Tensor]:
    """W of each step, from the definitions, but for the pairs, which are the algorithm's own."""
    from lightning_ring.algorithms.local.gossip import _in_pairs

    found = []
    for step in range(steps):
        w = torch.zeros(world_size, world_size, dtype=torch.float64)
        for rank in range(world_size):
            if topology == "ring":
                neighbours = {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}
            elif topology == "exponential":
                hops = [hop for hop in (1, 2, 4, 8) if hop < world_size]
                neighbours = {(rank - hops[step % len(hops)]) % world_size}
            else:
                neighbours = set(_in_pairs(rank, world_size, step, 0)[0])
            for other in neighbours | {rank}:
                w[rank, other] = 1 / (1 + len(neighbours))
        found.append(w)
    return found


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [*((world_size, "sgd") for world_size in (2, 3, 4, 5)), (4, "adamw")],
)
@pytest.mark.parametrize("topology", ["ring", "exponential", "pairs"])
def test_each_step_is_that_of_the_formula(topology: Any, world_size: int, optimizer: str) -> None:
    start = network()

    def rank(comm: Any) -> list[Tensor]:
        net, algorithm = copy.deepcopy(start), Gossip(topology)
        steps = OPTIMIZERS[optimizer](net)
        algorithm.attach(net, [steps], comm)
        found = []
        for _ in range(NUM_STEPS):
            one_step(net, steps, algorithm, comm.rank)
            found.append(parameters_to_vector(net.parameters()).detach().clone())
        algorithm.detach()
        return found

    found = run_ranks(world_size, rank)
    nets = [copy.deepcopy(start) for _ in range(world_size)]
    optimizers = [OPTIMIZERS[optimizer](net) for net in nets]
    for step, w in enumerate(weights(topology, world_size, NUM_STEPS)):
        assert torch.allclose(w.sum(0), torch.ones(world_size).double())
        assert torch.allclose(w.sum(1), torch.ones(world_size).double())
        for number, net in enumerate(nets):
            optimizers[number].zero_grad()
            loss(net, number, step).backward()
        with torch.no_grad():
            for column in zip(*(net.parameters() for net in nets), strict=True):
                stacked = torch.stack([param.double() for param in column])
                mixed = torch.einsum("rs,s...->r...", w, stacked)
                for param, value in zip(column, mixed, strict=True):
                    param.copy_(value)
        for number, net in enumerate(nets):
            optimizers[number].step()
            expected = parameters_to_vector(net.parameters())
            torch.testing.assert_close(found[number][step], expected, rtol=1e-4, atol=1e-5)


def test_a_step_with_a_closure_computes_the_batch_for_the_ranks_own_parameters() -> None:
    """As the Trainer's: the average, which travels meanwhile, is added behind the step."""

    def rank(comm: Any) -> tuple[list[Tensor], list[Tensor]]:
        net, algorithm = network(), Gossip()
        steps = torch.optim.SGD(net.parameters(), 0.1)
        algorithm.attach(net, [steps], comm)
        begun, computed_for = [], []
        for step in range(4):
            algorithm.begin_batch()
            begun.append(parameters_to_vector(net.parameters()).detach().clone())

            def closure(step: int = step) -> Tensor:
                computed_for.append(parameters_to_vector(net.parameters()).detach().clone())
                value = loss(net, comm.rank, step)
                value.backward()
                return value

            steps.zero_grad()
            algorithm.before_step(steps, has_closure=True)
            steps.step(closure)
            algorithm.after_step(steps)
        algorithm.detach()
        return [*begun, parameters_to_vector(net.parameters()).detach().clone()], computed_for

    ranks = run_ranks(2, rank)
    net = network()
    for step in range(4):
        before = [begun[step] for begun, _ in ranks]
        for number, (begun, computed_for) in enumerate(ranks):
            assert torch.equal(computed_for[step], before[number])
            torch.nn.utils.vector_to_parameters(before[number], net.parameters())
            gradient = torch.cat(
                [
                    g.reshape(-1)
                    for g in torch.autograd.grad(loss(net, number, step), net.parameters())
                ]
            )
            torch.testing.assert_close(
                begun[step + 1], (before[0] + before[1]) / 2 - 0.1 * gradient
            )


def test_averages_are_shown_between_steps_and_leave_no_trace() -> None:
    start = network()

    def rank(comm: Any, *, shown: bool) -> tuple[Tensor, list[Tensor], dict[str, float]]:
        net, algorithm = copy.deepcopy(start), Gossip()
        steps = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [steps], comm)
        means = []
        for _ in range(4):
            one_step(net, steps, algorithm, comm.rank)
            if shown:
                own = parameters_to_vector(net.parameters()).detach().clone()
                algorithm.show_averages()
                means.append(parameters_to_vector(net.parameters()).detach().clone())
                last = own
        algorithm.begin_batch()
        after = parameters_to_vector(net.parameters()).detach().clone()
        algorithm.detach()
        return after, [*means, last] if shown else [], algorithm.metrics()

    plain = run_ranks(3, lambda comm: rank(comm, shown=False))
    shown = run_ranks(3, lambda comm: rank(comm, shown=True))
    for (expected, _, _), (found, _, _) in zip(plain, shown, strict=True):
        assert torch.equal(found, expected)
    own = torch.stack([each[1][-1] for each in shown])
    assert plain[0][2] == {}
    for _, means, metrics in shown:
        torch.testing.assert_close(means[-2], own.mean(0))
        expected = (own - own.mean(0)).double().square().sum(1).mean().sqrt().item()
        assert metrics == {"consensus_distance": pytest.approx(expected, rel=1e-4)}
        assert expected > 0


def test_an_unknown_topology_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="topology='star', expected one of 'ring', 'exponential', 'pairs'"
    ):
        Gossip("star")  # type: ignore[arg-type]
