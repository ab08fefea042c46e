"""Rounds of `LocalSGD` in which whole nodes step alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from lightning_ring.algorithms.local import DiLoCo, LocalSGD
from tests.algorithms.local_training import NUM_STEPS, OPTIMIZERS, loss, network, one_step, trained
from tests.comm.test_hierarchical import run_nested
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize("nodes", [[[0, 2], [1, 3]], [[0, 1, 2], [3, 4, 5]]], ids=str)
@pytest.mark.parametrize(
    "make", [lambda: LocalSGD(3, in_nodes=True, warmup_steps=2), lambda: DiLoCo(3, in_nodes=True)]
)
def test_nodes_step_alone(nodes: list[list[int]], make: Callable[[], LocalSGD]) -> None:
    """As ranks would that have all the data of their node: one process a node."""
    start = network()

    def rank(comm: Any) -> list[Tensor]:
        net, algorithm, found = copy.deepcopy(start), make(), []
        optimizer = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [optimizer], comm)
        for _ in range(NUM_STEPS):
            one_step(net, optimizer, algorithm, comm.rank)
            found.append(parameters_to_vector(net.parameters()).detach().clone())
        algorithm.detach()
        return found

    def node(comm: Any) -> list[Tensor]:
        net, algorithm, found = copy.deepcopy(start), make(), []
        optimizer = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [optimizer], comm)
        for step in range(NUM_STEPS):
            algorithm.begin_batch()
            with algorithm.backward():
                torch.stack([loss(net, rank, step) for rank in nodes[comm.rank]]).mean().backward()
            algorithm.before_step(optimizer, has_closure=False)
            optimizer.step()
            algorithm.after_step(optimizer)
            optimizer.zero_grad()
            found.append(parameters_to_vector(net.parameters()).detach().clone())
        return found

    found, expected = run_nested(nodes, rank), run_ranks(len(nodes), node)
    for number, ranks in enumerate(nodes):
        for own in ranks:
            torch.testing.assert_close(
                torch.stack(found[own]), torch.stack(expected[number]), rtol=1e-4, atol=1e-6
            )
    assert not torch.equal(found[nodes[0][0]][3], found[nodes[1][0]][3])  # between two averages


def test_a_request_to_stop_is_agreed_on_by_all_nodes() -> None:
    def rank(comm: Any) -> list[bool]:
        net, algorithm, answers = network(), LocalSGD(3, in_nodes=True), []
        optimizer = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [optimizer], comm)
        for step in range(6):
            if step == 3 and comm.rank == 1:
                algorithm.ask_to_stop()
            one_step(net, optimizer, algorithm, comm.rank)
            answers.append(algorithm.agreed_to_stop())
        algorithm.detach()
        return answers

    assert run_nested([[0, 2], [1, 3]], rank) == 4 * [[False] * 5 + [True]]


def test_without_nested_rings_each_rank_steps_by_itself() -> None:
    own, plain = trained(2, LocalSGD(3, in_nodes=True), "sgd"), trained(2, LocalSGD(3), "sgd")
    assert all(
        torch.equal(torch.stack(one), torch.stack(other))
        for one, other in zip(own, plain, strict=True)
    )
