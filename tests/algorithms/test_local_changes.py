"""What changes in the middle of a round of ranks that step alone: frozen parameters, weights,
optimizers, settings.
"""

import copy

import pytest
import torch

from lightning_ring.algorithms.local import AsynchronousGossip, DiLoCo, LocalSGD
from lightning_ring.errors import ConfigurationError
from tests.algorithms.local_training import OPTIMIZERS, begin, one_step, vector
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize(
    "make",
    [lambda: LocalSGD(4), AsynchronousGossip],
    ids=["local", "asynchronous"],
)
def test_a_parameter_that_is_frozen_within_a_round_is_averaged(make):
    """At evaluations in that round, and at its end."""

    def rank(comm):
        algorithm = make()
        net, steps = begin(algorithm, comm)
        found = []
        for step in range(20):
            if step == 5:
                net[0].weight.requires_grad_(False)
            one_step(net, steps, algorithm, comm.rank)
            if step == 5:
                own = net[0].weight.detach().clone()
                algorithm.show_averages()
                found += [own, net[0].weight.detach().clone()]
                algorithm._hide_averages()
            if step in (12, 19):
                found.append(net[0].weight.detach().clone())
        algorithm.show_averages()
        algorithm.detach()
        return [*found, net[0].weight.detach().clone()]

    ranks = run_ranks(2, rank)
    own, shown, later, last, end = (torch.stack(each) for each in zip(*ranks, strict=True))
    assert not torch.equal(own[0], own[1])
    assert torch.equal(shown[0], shown[1])
    if make is not AsynchronousGossip:  # of which an average may be on its way
        torch.testing.assert_close(shown[0], own.mean(0))
    assert torch.equal(end[0], end[1])
    if make is not AsynchronousGossip:
        assert torch.equal(later[0], later[1])
        assert torch.equal(later, last)


def test_diloco_refuses_to_freeze_or_unfreeze_within_its_rounds():
    """Momentum would move a frozen parameter. In the warm-up all may change."""

    def rank(comm):
        algorithm = DiLoCo(4, warmup_steps=2)
        net, steps = begin(algorithm, comm)
        for step in range(5):
            net[0].weight.requires_grad_(step > 0)
            one_step(net, steps, algorithm, comm.rank)
        net[0].weight.requires_grad_(False)
        with pytest.raises(ConfigurationError, match="frozen, unfrozen or added"):
            one_step(net, steps, algorithm, comm.rank)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "make",
    [lambda: LocalSGD(4), lambda: DiLoCo(4), AsynchronousGossip],
    ids=["local", "diloco", "asynchronous"],
)
def test_weights_that_code_changes_beside_an_evaluation_are_kept(make):
    """As by `StochasticWeightAveraging`, which puts in its average at an epoch's end. A swap and
    back is no change.
    """

    def rank(comm):
        algorithm, said = make(), []
        net, steps = begin(algorithm, comm, inform=said.append)
        for _ in range(2):
            one_step(net, steps, algorithm, comm.rank)
        own = net[0].bias.detach().clone()
        algorithm.show_averages()
        with torch.no_grad():
            net[0].weight.data.fill_(0.5)
            shown = net[0].bias.clone()
            net[0].bias.add_(1)
            net[0].bias.copy_(shown)
        algorithm.begin_batch()
        if isinstance(algorithm, AsynchronousGossip):
            algorithm._hide_averages()
        found = net[0].weight.detach().clone(), net[0].bias.detach().clone()
        algorithm.show_averages()
        algorithm.detach()
        return *found, own, said

    for weight, bias, own, said in run_ranks(2, rank):
        assert torch.equal(weight, torch.full_like(weight, 0.5))
        if make is not AsynchronousGossip:  # of which an average may have been on its way
            assert torch.equal(bias, own)
        assert [text for text in said if "1 parameters were changed" in text]


def test_a_checkpoint_within_a_round_is_resumed_with_other_settings():
    """From the average, where ranks then agree at once."""

    def rank(comm):
        algorithm = DiLoCo(4)
        net, steps = begin(algorithm, comm)
        for _ in range(6):
            one_step(net, steps, algorithm, comm.rank)
        algorithm.show_averages()
        state = comm.broadcast_object(algorithm.state_dict())
        optimizer = comm.broadcast_object(copy.deepcopy(steps.state_dict()))
        found = []
        for make in (
            lambda: LocalSGD(3),
            lambda: LocalSGD(8, warmup_steps=7),
            lambda: DiLoCo(5),
        ):
            other, resumed = copy.deepcopy(net), make()
            again = OPTIMIZERS["sgd"](other)
            resumed.attach(other, [again], comm)
            again.load_state_dict(copy.deepcopy(optimizer))
            said = resumed.load_state_dict(copy.deepcopy(state))
            start = vector(other)
            one_step(other, again, resumed, comm.rank)
            one = vector(other)
            for _ in range(5):
                one_step(other, again, resumed, comm.rank)
            found.append((said, start, one, vector(other)))
        return found

    first, second = run_ranks(2, rank)
    (said, start, *_), (said_in_warmup, begun, one, *_), (said_of_rounds, *_) = first
    assert "this job has 2 ranks and {'every': 3" in said
    assert torch.equal(start, second[0][1])
    assert "'warmup_steps': 7" in said_in_warmup
    assert torch.equal(begun, second[1][1])
    assert torch.equal(one, second[1][2])  # gradients and momentum are the same
    assert "'every': 5" in said_of_rounds
