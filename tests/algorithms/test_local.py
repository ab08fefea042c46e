"""`LocalSGD` and `DiLoCo` against their formulas in one process. Ranks are threads, but for the
last test.
"""

import copy

import pytest
import torch

from lightning_ring import ElasticStrategy, RingFabricStrategy, RingStrategy
from lightning_ring.algorithms.local import DiLoCo, LocalSGD
from lightning_ring.errors import ConfigurationError
from tests.algorithms.local_training import (
    NUM_STEPS,
    OPTIMIZERS,
    begin,
    loss,
    network,
    one_step,
    trained,
    vector,
)
from tests.battery import check_names
from tests.thread_ranks import run_ranks

MODULE = "tests.checks.local_steps"


def reference(world_size, optimizer, *, every, warmup, outer):
    """The formulas of the papers, over copies of the network in one process; ``outer``: Algorithm 1
    of DiLoCo.
    """
    nets = [network() for _ in range(world_size)]
    anchors = [p.detach().clone() for p in nets[0].parameters()]
    velocities = [torch.zeros_like(anchor) for anchor in anchors]
    optimizers = [OPTIMIZERS[optimizer](net) for net in nets]
    found = [[] for _ in nets]
    for step in range(NUM_STEPS):
        for rank, (net, steps) in enumerate(zip(nets, optimizers, strict=True)):
            steps.zero_grad()
            loss(net, rank, step).backward()
        columns = list(zip(*(net.parameters() for net in nets), strict=True))
        for column in columns if step < warmup else ():
            mean = torch.stack([p.grad for p in column]).mean(0)
            for p in column:
                p.grad = mean.clone()
        for steps in optimizers:
            steps.step()
        averages = step >= warmup and (step + 1 - warmup) % every == 0
        for place, column in enumerate(columns if averages else ()):
            mean = torch.stack(column).mean(0).detach()
            if outer:
                change = anchors[place] - mean
                velocities[place] = 0.9 * velocities[place] + change
                mean = anchors[place] - 0.7 * (change + 0.9 * velocities[place])
                anchors[place] = mean
            for p in column:
                p.data.copy_(mean)
        if step + 1 == warmup:
            anchors = [p.detach().clone() for p in nets[0].parameters()]
        for rank, net in enumerate(nets):
            found[rank].append(vector(net))
    return found


@pytest.mark.parametrize(("world_size", "optimizer"), [(2, "sgd"), (3, "adamw"), (4, "sgd")])
@pytest.mark.parametrize(("every", "warmup"), [(3, 0), (4, 3)])
@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_equals_the_formula_in_one_process(world_size, optimizer, every, warmup, kind):
    found = trained(world_size, kind(every, warmup_steps=warmup), optimizer)
    outer = kind is DiLoCo
    expected = reference(world_size, optimizer, every=every, warmup=warmup, outer=outer)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalSGD(4),
        lambda: LocalSGD(4, warmup_steps=5),
        lambda: DiLoCo(4),
    ],
)
def test_averages_are_shown_without_a_trace_and_a_round_is_resumed_exactly(make):
    """After each of the first 7 steps averages are shown. After some a checkpoint is written, from
    which another job goes on: in the middle of a round, before its last step, after it."""
    straight = trained(3, make(), "adamw")

    def rank(comm):
        algorithm, found = make(), []
        net, steps = begin(algorithm, comm, "adamw")
        for step in range(7):
            one_step(net, steps, algorithm, comm.rank)
            algorithm.show_averages()
            algorithm.show_averages()  # once is enough
            shown = vector(net)
            if step not in (1, 2, 3, 5):
                found.append((shown, None))
                continue
            state = comm.broadcast_object(algorithm.state_dict())  # from a file of rank 0's
            other, resumed = copy.deepcopy(net), make()
            again = OPTIMIZERS["adamw"](other)
            resumed.attach(other, [again], comm)
            # rank 0's, as Lightning
            again.load_state_dict(comm.broadcast_object(copy.deepcopy(steps.state_dict())))
            assert resumed.load_state_dict(state) == ""
            for _ in range(step + 1, NUM_STEPS):
                one_step(other, again, resumed, comm.rank)
            resumed.detach()
            found.append((shown, vector(other)))
        algorithm.detach()
        return found

    by_rank = run_ranks(3, rank)
    for step in range(7):
        mean = torch.stack([own[step] for own in straight]).mean(0)
        for own, results in zip(straight, by_rank, strict=True):
            shown, end = results[step]
            torch.testing.assert_close(shown, mean, rtol=1e-5, atol=1e-7)
            assert torch.equal(shown, by_rank[0][step][0])
            assert end is None or torch.equal(end, own[-1]), step


def test_another_number_of_ranks_goes_on_from_the_average():
    def save(comm):
        algorithm = LocalSGD(4)
        net, steps = begin(algorithm, comm)
        for _ in range(6):
            one_step(net, steps, algorithm, comm.rank)
        return algorithm.state_dict()

    state = run_ranks(3, save)[0]

    def load(comm):
        algorithm = LocalSGD(4)
        net, _ = begin(algorithm, comm)
        message = algorithm.load_state_dict(state)
        # the checkpoint's averages
        assert torch.equal(vector(net), vector(network()))
        return message, algorithm.num_steps

    message, num_steps = run_ranks(2, load)[0]
    assert "after 6 steps of 3 ranks" in message
    assert "this job has 2" in message
    assert num_steps == 4


def test_a_request_to_stop_reaches_every_rank_with_the_next_exchange():
    def rank(comm):
        algorithm, answers = LocalSGD(3, warmup_steps=1), []
        net, steps = begin(algorithm, comm)
        for step in range(8):
            algorithm.ask_to_stop(step >= 5 and comm.rank == 1 and True not in answers)
            one_step(net, steps, algorithm, comm.rank)
            answers.append(algorithm.agreed_to_stop())
        algorithm.detach()
        return answers

    assert run_ranks(2, rank) == 2 * [[step == 6 for step in range(8)]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: LocalSGD(0), "every=0"),
        (lambda: LocalSGD(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: LocalSGD(compression="bf16"), "compression='bf16' with warmup_steps=0"),
        (lambda: DiLoCo(outer_momentum=1), "outer_momentum=1"),
        (lambda: DiLoCo(outer_lr=0), "outer_lr=0"),
        (
            lambda: RingStrategy(algorithm=LocalSGD(), uneven="join"),
            "uneven='join' with algorithm=LocalSGD",
        ),
        (
            lambda: RingFabricStrategy(algorithm="ring_local", compression="int8"),
            "LocalSGD got compression='int8'",
        ),
        (lambda: ElasticStrategy(algorithm=LocalSGD()), "LocalSGD keeps state of its ranks"),
    ],
)
def test_what_cannot_work_is_refused(make, words):
    with pytest.raises(ConfigurationError, match=words):
        make()


def test_the_names_of_the_strategy():
    algorithm = RingFabricStrategy(algorithm="ring_local").options.new_algorithm()
    assert isinstance(algorithm, LocalSGD)
    assert algorithm.every == 8


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_real_ranks(battery, check):
    battery(MODULE, 3, check)
