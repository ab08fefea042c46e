"""Rounds of `LocalSGD` whose length is measured, and those of whole nodes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from lightning_ring.algorithms.local import DiLoCo, LocalSGD
from lightning_ring.algorithms.local.pace import Pace
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


def test_every_auto_is_one_number_from_the_slowest_step_and_the_shortest_wait() -> None:
    def rank(comm: Any) -> tuple[int, str]:
        pace = Pace()
        pace._steps = [(0.0, 9.0), (1.0, 1.0 + 0.01 * (comm.rank + 1)), (2.0, 2.0)]
        pace.averages = [3.0, 0.046 if comm.rank == 1 else 1.0]
        return pace.choose(comm)

    assert run_ranks(3, rank) == 3 * [
        (math.ceil(0.046 / 0.003), "a step takes 30.0 ms, an average 46.0 ms")
    ]


def test_every_auto_measures_two_rounds_and_is_kept_by_checkpoints() -> None:
    def rank(comm: Any) -> tuple[int, list[Tensor], list[str], dict[str, Any]]:
        net, algorithm, said = network(), LocalSGD("auto", warmup_steps=1), []
        optimizer = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [optimizer], comm, inform=said.append)
        found = []
        for step in range(9):
            if step == 4:
                assert algorithm.state_dict()["rounds"] is None
            one_step(net, optimizer, algorithm, comm.rank)
        while len(found) < algorithm.every:
            assert algorithm.steps_of_round == len(found)
            one_step(net, optimizer, algorithm, comm.rank)
            found.append(parameters_to_vector(net.parameters()).detach().clone())
        state = comm.broadcast_object(algorithm.state_dict())
        resumed = LocalSGD("auto", warmup_steps=1)
        resumed.attach(net, [optimizer], comm)
        assert resumed.load_state_dict(state) == ""
        assert (resumed.every, resumed.steps_of_round, resumed._pace) == (algorithm.every, 0, None)
        return algorithm.every, found, said, state

    (every, first, said, _), (_, other, _, _) = run_ranks(2, rank)
    assert [torch.equal(*pair) for pair in zip(first, other, strict=True)] == [False] * (
        every - 1
    ) + [True]
    assert f"averages follow every {every} steps from now on" in said[-1]


def test_every_auto_tells_steps_and_averages_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.5  # of an average
    chosen: list[Pace] = []
    choose, average = Pace.choose, LocalSGD._average_parameters

    def noted(pace: Pace, comm: Any) -> tuple[int, str]:
        chosen.append(pace)
        return choose(pace, comm)

    def slow(algorithm: LocalSGD) -> None:
        time.sleep(seconds)
        average(algorithm)

    monkeypatch.setattr(Pace, "choose", noted)
    monkeypatch.setattr(LocalSGD, "_average_parameters", slow)

    def rank(comm: Any) -> None:
        net, algorithm = network(), LocalSGD("auto")
        optimizer = OPTIMIZERS["sgd"](net)
        algorithm.attach(net, [optimizer], comm)
        for _ in range(8):
            one_step(net, optimizer, algorithm, comm.rank)

    run_ranks(2, rank)
    assert len(chosen) == 2
    for pace in chosen:
        assert len(pace._steps) == 7
        assert max(ended - began for began, ended in pace._steps) < seconds
        assert min(pace.averages) >= seconds
