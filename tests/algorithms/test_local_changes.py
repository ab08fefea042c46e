"""What changes in the middle of a round of ranks that step alone: frozen parameters, weights,
optimizers, settings.
"""

import copy

import pytest
import torch

from lightning_ring.algorithms.local import AsynchronousGossip, DiLoCo, LocalSGD
from tests.algorithms.local_training import OPTIMIZERS, begin, one_step, vector
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(4),
        lambda: DiLoCo(4),
        lambda: DiLoCo(4, fragments=2, overlap=1),
        AsynchronousGossip,
    ],
    ids=["local", "diloco", "streaming", "asynchronous"],
)
def test_a_parameter_that_is_frozen_within_a_round_is_averaged(make):
    """At evaluations in that round, and at its end; with `DiLoCo` it is then at rest, whatever
    its momentum.
    """

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
    """From the average, where ranks then agree at once; with other fragments all of them still
    travel.
    """

    def rank(comm):
        algorithm = DiLoCo(4, fragments=4, overlap=2)
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
            lambda: DiLoCo(2, fragments=2),
        ):
            other, resumed = copy.deepcopy(net), make()
            again = OPTIMIZERS["sgd"](other)
            resumed.attach(other, [again], comm)
            again.load_state_dict(optimizer)
            said = resumed.load_state_dict(copy.deepcopy(state))
            start = vector(other)
            one_step(other, again, resumed, comm.rank)
            one = vector(other)
            for _ in range(5):
                one_step(other, again, resumed, comm.rank)
            found.append((said, start, one, getattr(resumed, "_fragment_of", {})))
        return found

    first, second = run_ranks(2, rank)
    (said, start, *_), (said_in_warmup, begun, one, _), (said_of_fragments, *_, parts) = first
    assert "a round begins there" in said
    assert torch.equal(start, second[0][1])
    assert "warmup_steps=7" in said_in_warmup
    assert torch.equal(begun, second[1][1])
    assert torch.equal(one, second[1][2])  # gradients and momentum are the same
    assert "other every, fragments" in said_of_fragments
    assert set(parts.values()) == {0, 1}
