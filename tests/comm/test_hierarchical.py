"""Node first, then across nodes: thread-ranks on made-up nodes, compared with a plain reduction
and with one ring.
"""

import itertools
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
from torch.testing import assert_close

from lightning_ring.comm import hierarchical
from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.comm.ring_communicator import RingCommunicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import CollectiveError
from lightning_ring.job import members
from lightning_ring.job.communicators import is_hierarchical
from lightning_ring.job.members import own_member
from lightning_ring.job.ranks import SINGLE
from tests.battery import check_names
from tests.checks.reductions import allowed, plain, tolerance, values
from tests.refusals import refused
from tests.thread_ranks import ThreadTransport, ThreadWorld, run_ranks

# nodes, by the ranks on each: in blocks, round-robin, in no order; two and three nodes; two and
# three ranks a node
NODES = [
    [[0, 1], [2, 3]],
    [[0, 2], [1, 3]],
    [[0, 3], [1, 2]],
    [[0, 2, 4], [1, 3, 5]],
    [[0, 3], [1, 4], [2, 5]],
]
LENGTHS = [0, 1, 7, 5003, 6000]  # 6,000: equal shards
SOME = [torch.float32, torch.int32]


def run_nested(nodes, fn):
    """`run_ranks` on a `HierarchicalCommunicator` whose every level is a ring of threads."""
    peers = [sorted(ranks) for ranks in zip(*nodes, strict=True)]
    inward, outward = ([ThreadWorld(len(ranks)) for ranks in nodes] for _ in range(2))
    across = [ThreadWorld(len(ranks)) for ranks in peers]

    def rank(comm):
        node = next(index for index, ranks in enumerate(nodes) if comm.rank in ranks)
        local_rank = nodes[node].index(comm.rank)
        policy = WaitPolicy(timedelta(seconds=60), comm._policy.check)

        def level(world, ranks):
            return RingCommunicator(ThreadTransport(world, ranks.index(comm.rank)), policy, ranks)

        nested = HierarchicalCommunicator(
            comm.transport,
            level(inward[node], nodes[node]),
            level(outward[node], nodes[node]),
            level(across[local_rank], peers[local_rank]),
            peers,
            policy,
        )
        try:
            return fn(nested)
        finally:
            nested.close()
            nested.close()

    with mock.patch.multiple(
        hierarchical,
        LEAST_PIECE_BYTES=4096,
        num_nested_pieces=lambda num_bytes, *_: max(1, -(-num_bytes // 4096)),
    ):
        return run_ranks(sum(map(len, nodes)), rank)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_every_op_equals_a_plain_reduction(nodes):
    world_size = sum(map(len, nodes))
    cases = [(dtype, op, n) for dtype, op in allowed() if dtype in SOME for n in LENGTHS]

    def rank(comm):
        outputs = [values(numel, dtype, world_size)[comm.rank] for dtype, op, numel in cases]
        works = [
            comm.all_reduce_(out, op=op) for out, (_, op, _) in zip(outputs, cases, strict=True)
        ]
        for work in reversed(works):  # in any order
            work.wait()
        assert all(work.done() for work in works)
        return outputs

    results = run_nested(nodes, rank)
    for index, (dtype, op, numel) in enumerate(cases):
        expected = plain(values(numel, dtype, world_size), op)
        assert_close(results[0][index], expected, **tolerance(dtype))
        assert all(torch.equal(result[index], results[0][index]) for result in results)


@pytest.mark.parametrize("nodes", NODES, ids=str)
def test_the_halves_leave_the_shards_that_the_communicator_names(nodes):
    world_size = sum(map(len, nodes))

    def rank(comm):
        cases = itertools.product(SOME, (ReduceOp.SUM, ReduceOp.AVG), LENGTHS)
        for dtype, op, numel in cases:
            inputs = values(numel, dtype, world_size)
            expected = plain(inputs, op)
            flat = inputs[comm.rank]
            comm.reduce_scatter_(flat, op=op).wait()
            own = shard(flat, world_size, comm.shard_index).clone()
            mine = shard(expected, world_size, comm.shard_index)
            assert_close(own, mine, **tolerance(dtype))
            flat.fill_(0)  # nothing else of it may be needed
            shard(flat, world_size, comm.shard_index).copy_(own)
            comm.all_gather_(flat).wait()
            assert_close(flat, expected, **tolerance(dtype))
        return comm.shard_index

    assert sorted(run_nested(nodes, rank)) == list(range(world_size))


@pytest.mark.parametrize("nodes", NODES[1:4], ids=str)
def test_broadcast(nodes):
    world_size = sum(map(len, nodes))

    def rank(comm):
        for src in range(world_size):
            for numel in (3, 30_000):  # straight to everybody; by node
                tensor = torch.full((numel,), float(comm.rank))
                comm.broadcast_(tensor, src=src).wait()
                assert torch.equal(tensor, torch.full((numel,), float(src)))

    run_nested(nodes, rank)


def test_a_bucket_is_reduced_in_the_node_while_another_one_is_on_the_wire():
    first_is_waiting, second_is_reduced = threading.Event(), threading.Event()

    def rank(comm):
        across, inward = comm._across.all_reduce_, comm._intra_first.reduce_scatter_

        class SlowWire:
            def __init__(self, work):
                self.work = work

            def wait(self):
                first_is_waiting.set()
                assert second_is_reduced.wait(20), "bucket 1 waits for bucket 0's wire"
                self.work.wait()

        def slow_wire(tensor, **kwargs):
            work = across(tensor, **kwargs)
            return SlowWire(work) if kwargs["name"] == "bucket 0" else work

        def watched(tensor, **kwargs):
            work = inward(tensor, **kwargs)
            if kwargs["name"] == "bucket 1":
                work.wait()
                assert first_is_waiting.wait(20)
                second_is_reduced.set()
            return work

        comm._across.all_reduce_, comm._intra_first.reduce_scatter_ = slow_wire, watched
        tensors = [torch.full((5000,), float(comm.rank)) for _ in range(2)]
        works = [
            comm.all_reduce_(tensor, name=f"bucket {index}") for index, tensor in enumerate(tensors)
        ]
        for work in works:
            work.wait()
        assert all(torch.equal(tensor, torch.full((5000,), 6.0)) for tensor in tensors)

    run_nested(NODES[1], rank)


def test_a_piece_that_ends_after_later_ones_is_waited_for():
    """Over several channels pieces may end in any order."""

    class Late(threading.Event):
        done = threading.Event.is_set

    def rank(comm):
        gather, late = comm._intra_last.all_gather_, Late()
        calls = itertools.count()

        def out_of_order(tensor, **kwargs):
            work = gather(tensor, **kwargs)
            return late if next(calls) == 0 else work

        comm._intra_last.all_gather_ = out_of_order
        tensor = torch.full((5000,), float(comm.rank))  # five pieces of 4 KiB
        work = comm.all_reduce_(tensor)
        threading.Timer(0.5, late.set).start()
        time.sleep(0.2)
        assert not work.done()
        work.wait()
        assert late.done()
        assert next(calls) == 5

    run_nested(NODES[1], rank)


def test_past_the_timeout_the_missing_rank_is_named_by_its_number_in_the_job():
    over = threading.Barrier(4)

    def agreed_but_gone(comm):
        """Rank 3 agrees to the call; its part of the node's reduce-scatter never comes."""
        comm.barrier()
        comm._policy.timeout = timedelta(seconds=0.7)
        if comm.rank == 3:
            comm._intra_first.reduce_scatter_ = lambda *args, **kwargs: NeverOver()
        with pytest.raises(CollectiveError) as caught:
            comm.all_reduce_(torch.ones(90_000), name="bucket 7").wait()
        if comm.rank != 3:
            over.wait(50)
        return str(caught.value)

    class NeverOver:
        def wait(self):
            over.wait(50)
            raise CollectiveError("rank 3 is this one")

        def done(self):
            return False

    texts = run_nested(NODES[1], agreed_but_gone)
    assert "within 0.7 s: still waiting for rank 3." in texts[1]  # on its node
    assert "bucket 7" in texts[2]


def test_one_that_is_replaced_does_not_wait_for_what_a_peer_never_sent():
    never = threading.Event()

    def rank(comm):
        comm._across.all_reduce_ = lambda *args, **kwargs: never
        work = comm.all_reduce_(torch.ones(9000), name="bucket 7")
        time.sleep(0.2)  # all ranks have agreed, and wait for the wire
        began = time.monotonic()
        comm.abandon()
        with pytest.raises(CollectiveError, match="replaced by a new one"):
            work.wait()
        return time.monotonic() - began

    assert max(run_nested(NODES[0], rank)) < 30
    never.set()


def test_the_fabric_is_what_the_system_lists(tmp_path, monkeypatch):
    monkeypatch.setattr(members, "_RDMA_DEVICES", tmp_path / "infiniband")
    found = []
    for folder in ("", "infiniband", "infiniband/mlx5_0"):
        (tmp_path / folder).mkdir(exist_ok=True)
        found.append(own_member(SINGLE, 0, torch.device("cpu")).rdma)
    assert found == [False, False, True]


def test_gpus_are_left_to_nccl():
    assert not is_hierarchical("auto", [[0, 1], [2, 3]], "cuda")
    with refused("NCCL itself arranges the ranks by node"):
        is_hierarchical("hierarchical", [[0, 1], [2, 3]], "cuda")


@pytest.mark.parametrize("check", check_names("tests.checks.topology"))
def test_on_real_ranks(battery, check):
    battery("tests.checks.topology", 4, check, OMPI_MCA_mpi_yield_when_idle="1")
