"""When gradients travel: in every kind of backward each is averaged once, on all ranks."""

from tests.checks.gradients.nets import (
    assert_same,
    batches,
    fresh_gradients,
    make,
    mine,
    reference_mean,
)
from tests.checks.world import communicator


def check_first_bucket_leaves_before_the_last_gradient():
    net, _, reducer, comm, _ = make()
    with reducer.backward():
        net(mine(batches())).backward()
    comm.sent.clear()
    comm.produced.clear()
    comm.produced_when_sent.clear()
    with fresh_gradients(net), reducer.backward():
        net(mine(batches(1))).backward()
    total = len(list(net.parameters()))
    assert len(comm.sent) == len(reducer.buckets) > 2
    assert comm.produced_when_sent[0] < total / 2, comm.produced_when_sent
    assert comm.produced_when_sent == sorted(comm.produced_when_sent)


def check_gradients_in_several_parts_on_one_rank_alone():
    """The other ranks have no backward that would show it."""
    net, reference, reducer, comm, warnings = make(reentrant=True)
    for step in range(2):
        xs = batches(step)
        with fresh_gradients(net, reference):
            if comm.rank == 0:
                with reducer.backward():
                    net(mine(xs), (2, 3, 2, 3, 4, 5)).backward()
            else:
                with reducer.backward():
                    pass
        (reference(xs[0], (2, 3, 2, 3, 4, 5)) / len(xs)).backward()
        assert_same(net, reference)
    assert len(warnings) == 1, warnings


def check_accumulation_travels_once():
    net, reference, reducer, comm, _ = make()
    for window in range(2):
        with fresh_gradients(net, reference, set_to_none=window == 0):
            comm.sent.clear()
        for micro in range(3):
            xs = batches(10 * window + micro)
            # layers 4 and 5 only in the first micro-batch: their gradient travels though the last
            # has none for them
            path = (0, 1, 2, 3, 4, 5) if micro == 0 else (0, 1, 2, 3)
            if micro < 2:
                with reducer.no_sync(), reducer.backward():
                    net(mine(xs), path).backward()
                assert not comm.sent
            else:
                with reducer.backward():
                    net(mine(xs), path).backward()
            reference_mean(reference, xs, path)
        assert len(comm.sent) == len(reducer.buckets)
        assert_same(net, reference)


def check_divides_by_the_ranks_that_hold_data():
    net, reference, reducer, _, _ = make()
    xs = batches()
    size = communicator().world_size
    active = max(1, size - 1)
    reducer.active_ranks = active
    if communicator().rank < active:
        with reducer.backward():
            net(mine(xs)).backward()
    else:
        with reducer.backward():
            pass
    reference_mean(reference, xs[:active])
    assert_same(net, reference)
