"""`AsynchronousGossip` against its formula in one process. Ranks are threads, but for the last
test.
"""

import math
import threading

import pytest
import torch
from torch.testing import assert_close

from lightning_ring import ElasticStrategy, RingStrategy
from lightning_ring.algorithms.local import AsynchronousGossip, gossip
from tests.algorithms.local_training import OPTIMIZERS, begin, loss, network, one_step, vector
from tests.refusals import refused
from tests.thread_ranks import run_ranks


def turns(world_size, number):
    """The rank of each step, in an order in which one rank takes twice as many."""
    return [(0, *range(world_size))[turn % (world_size + 1)] for turn in range(number)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_in_an_order_of_their_own_are_those_of_the_formula(
    world_size, optimizer, monkeypatch
):
    """The ranks take turns, so that it is known which averages come before which step."""
    parts = world_size - 1
    monkeypatch.setattr(gossip, "num_gossip_parts", lambda num_bytes: parts)
    order = turns(world_size, 13)
    averages = []  # in their order

    class Noting(AsynchronousGossip):
        def _answer(self, peer, question):
            averages.append((peer, self._comm.rank))
            return super()._answer(peer, question)

    def rank(comm):
        algorithm = Noting(seed=4)
        net, steps = begin(algorithm, comm, optimizer)
        algorithm.begin_batch()
        comm.barrier()
        found = []
        for turn in order:
            if turn == comm.rank:
                loss(net, comm.rank, algorithm.num_steps).backward()
                steps.step()
                algorithm.after_step(steps)  # begins an average
                steps.zero_grad()
                found.append(vector(net))
                algorithm._finish_exchange()  # before the next turn
                algorithm.begin_batch()
            comm.barrier()
        algorithm.show_averages()
        found.append(vector(net))
        algorithm.detach()
        return found

    found = run_ranks(world_size, rank)
    # with the parameters for which gradients are computed
    nets = [network() for _ in range(world_size)]
    optimizers = [OPTIMIZERS[optimizer](net) for net in nets]
    x = [vector(net) for net in nets]
    taken = [0] * world_size
    active = [rank for rank in range(world_size) if rank % 2 == 0]
    remaining = averages[::parts]
    for turn in order:
        before = vector(nets[turn])
        optimizers[turn].zero_grad()
        loss(nets[turn], turn, taken[turn]).backward()
        optimizers[turn].step()
        x[turn] = x[turn] + vector(nets[turn]) - before
        torch.nn.utils.vector_to_parameters(x[turn].clone(), nets[turn].parameters())
        assert_close(found[turn][taken[turn]], x[turn], rtol=1e-4, atol=1e-6)
        taken[turn] += 1
        if turn in active:
            one, other = remaining.pop(0)
            assert one == turn
            assert other % 2 == 1
            x[one] = x[other] = (x[one] + x[other]) / 2
    assert not remaining
    for shown in found:
        assert_close(shown[-1], torch.stack(x).mean(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("overlap", [0, None])
def test_a_slow_rank_holds_nobody_up_and_averages_leave_no_trace(overlap):
    def rank(comm, *, slow, through):
        algorithm = AsynchronousGossip(overlap=overlap)
        net, steps = begin(algorithm, comm)
        for step in range(6):
            if comm.rank == slow and step == 2:
                assert through.wait(50), "the other one is held up"
            one_step(net, steps, algorithm, comm.rank)
        if comm.rank != slow:
            through.set()
        own = vector(net)
        algorithm.show_averages()
        shown = vector(net)
        assert not torch.equal(own, shown)
        distance = algorithm.metrics()["consensus_distance"]
        averaged = torch.cat([algorithm._own[param].flatten() for param in net.parameters()])
        algorithm.detach()
        return averaged, shown, distance

    for slow in (0, 1):  # the one that asks, and the one that answers
        through = threading.Event()
        found = run_ranks(
            2, lambda comm, slow=slow, through=through: rank(comm, slow=slow, through=through)
        )
        assert torch.equal(found[0][1], found[1][1])
        distances = [torch.dist(averaged, shown).square().item() for averaged, shown, _ in found]
        for *_, distance in found:  # 0 where the last average came behind all steps
            assert distance == pytest.approx(math.sqrt(sum(distances) / 2), rel=1e-3, abs=1e-6)


class Late(AsynchronousGossip):
    """Rank 1 gives no answer before ``may_answer``."""

    may_answer: threading.Event

    def _answer(self, peer, question):
        assert self.may_answer.wait(50), "the other one waits"
        return super()._answer(peer, question)


@pytest.mark.parametrize(("overlap", "num_steps"), [(None, 3), (3, 3), (1, 1), (0, 0)])
def test_steps_go_on_while_an_average_is_on_its_way(overlap, num_steps):
    """Then each rank has half of the other's, and both keep their own."""
    may_answer = threading.Event()

    def rank(comm):
        algorithm = Late(overlap=overlap)
        algorithm.may_answer = may_answer
        net, steps = begin(algorithm, comm)
        one_step(net, steps, algorithm, comm.rank)  # after which rank 0 asks
        comm.barrier()
        found = [vector(net)]
        if comm.rank == 0:
            for _ in range(num_steps):
                one_step(net, steps, algorithm, 0)
            found.append(vector(net))
            may_answer.set()
            algorithm._finish_exchange()
        comm.barrier()
        algorithm._add_step()  # of length 0: the parameters become x
        found.append(vector(net))
        algorithm.show_averages()
        algorithm.detach()
        return [*found, vector(net)]

    (sent, alone, first, shown), (theirs, second, _) = run_ranks(2, rank)
    assert_close(second, (theirs + sent) / 2)
    assert_close(first, alone + (theirs - sent) / 2)
    assert_close(shown, (first + second) / 2)
    assert torch.allclose(alone, sent) == (num_steps == 0)


@pytest.mark.parametrize("overlap", [0, 2])
def test_a_step_beyond_the_overlap_waits_for_the_average(overlap):
    may_answer, begins, has_ended = threading.Event(), threading.Event(), threading.Event()

    def rank(comm):
        algorithm = Late(overlap=overlap)
        algorithm.may_answer = may_answer
        net, steps = begin(algorithm, comm)
        algorithm.begin_batch()
        if comm.rank == 0:
            for number in range(overlap + 2):  # the first one asks
                if number == overlap + 1:
                    begins.set()
                one_step(net, steps, algorithm, 0)
            has_ended.set()
        else:
            assert begins.wait(50)
            ended = has_ended.wait(0.2)
            may_answer.set()
            assert not ended
            assert has_ended.wait(50)
        algorithm.detach()

    run_ranks(2, rank)


def test_a_request_to_stop_is_met_by_all_ranks():
    def rank(comm):
        algorithm, stops = AsynchronousGossip(), []
        net, steps = begin(algorithm, comm)
        for epoch, batches in enumerate(((6, 6, 6), (2, 6, 9), (6, 6, 6))):
            for step in range(batches[comm.rank]):
                if (epoch, step, comm.rank) == (1, 4, 1):
                    algorithm.ask_to_stop()
                if algorithm.agreed_to_stop():
                    stops.append((epoch, comm.all_gather_object(step) != []))
                    algorithm.ask_to_stop(False)
                one_step(net, steps, algorithm, comm.rank)
            algorithm.show_averages()
        algorithm.detach()
        return stops

    found = run_ranks(3, rank)
    assert found == 3 * [found[0]]
    # the next epoch's, where rank 0 had ended this one
    assert found[0] in ([(1, True)], [(2, True)])


def test_what_cannot_work_is_refused():
    for overlap in (-1, 0.5, True, "1"):
        with refused("expected a number of steps, or None"):
            AsynchronousGossip(overlap=overlap)
    for arguments in ({"uneven": "join"}, {"broadcast_buffers": "step"}, {"compression": "int8"}):
        with refused("AsynchronousGossip"):
            RingStrategy(algorithm=AsynchronousGossip(), **arguments)
    with refused("AsynchronousGossip"):
        ElasticStrategy(algorithm=AsynchronousGossip())
