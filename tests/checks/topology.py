"""Checks of the choice of a topology, and of what was chosen, on 4 ranks of one machine placed
on made-up nodes.
"""

import contextlib
import itertools
from datetime import timedelta
from functools import cache

import pytest
import torch
import torch.distributed as dist

from lightning_ring.comm.backends.gloo import GlooCommunicator
from lightning_ring.comm.backends.shared_memory import memory as shared_memory
from lightning_ring.comm.backends.shared_memory.communicator import SharedMemoryCommunicator
from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.job import job as job_module
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job, current_job, open_job
from lightning_ring.job.members import JobMember, info_of
from tests.checks.ranks import WORLD
from tests.checks.world import open_gloo, raised_by_all

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=60)
ROUND_ROBIN, BLOCKS, UNEVEN, APART = [0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3]

torch.set_num_threads(1)
_number = itertools.count()


@cache
def store():
    open_gloo()
    held = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if WORLD.rank == 0
        else None
    )
    port = WORLD.bcast(held.port if held else None)
    return held or dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)


def info_on(nodes):
    """This rank in a job whose rank r is on node ``nodes[r]``."""
    return info_of(
        WORLD.rank, [JobMember(rank, node) for rank, node in enumerate(nodes)], "mpi", generation=0
    )


@contextlib.contextmanager
def opened(nodes, backend="auto", topology="auto", fabric=False):
    """What a job gets whose rank r is on node ``nodes[r]``."""
    members = [JobMember(rank, node, rdma=fabric) for rank, node in enumerate(nodes)]
    job = Job(info_on(nodes), members, dist.PrefixStore(f"job {next(_number)}", store()))
    comm = open_communicator(job, backend, CPU, TIMEOUT, TIMEOUT, topology)
    yield comm
    comm.close()


def check_auto_nests_what_shares_nodes_evenly():
    for nodes in (ROUND_ROBIN, BLOCKS):
        with opened(nodes) as comm:
            assert isinstance(comm, HierarchicalCommunicator)
            assert isinstance(comm._intra_first, SharedMemoryCommunicator)
            assert isinstance(comm._across, GlooCommunicator)
    for nodes, topology in ((ROUND_ROBIN, "flat"), (UNEVEN, "auto"), (APART, "auto")):
        with opened(nodes, topology=topology) as comm:
            assert isinstance(comm, GlooCommunicator)


def check_jobs_one_after_the_other_over_two_nodes():
    open_gloo()
    dist.destroy_process_group()  # of the checks: a job opens its own
    for nodes, backend in ((BLOCKS, "auto"), (ROUND_ROBIN, "mpi")):
        held = dist.PrefixStore(f"job {next(_number)}", store())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(job_module, "open_store", lambda *meeting, held=held: held)
            job = open_job(info_on(nodes), CPU, TIMEOUT)
        comm = open_communicator(job, backend, CPU, TIMEOUT, TIMEOUT)
        assert isinstance(comm, HierarchicalCommunicator)
        assert comm.rank == job.info.rank
        total = torch.full((90_000,), float(comm.rank))
        comm.all_reduce_(total).wait()
        assert (total == 6).all()
        job.close()
        assert current_job() is None
    open_gloo.__wrapped__()  # it was called: the checks after this one need it again


def check_a_node_whose_second_segment_fails_has_all_nodes_use_messages():
    make, made = shared_memory._make, []

    def make_one(num_bytes):
        made.append(num_bytes)
        return (
            (None, {"error": "no memory left"})
            if WORLD.rank == 1 and len(made) == 2
            else make(num_bytes)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_memory, "_make", make_one)
        with opened(ROUND_ROBIN) as comm:
            assert isinstance(comm, HierarchicalCommunicator)
            assert not isinstance(comm._intra_first, SharedMemoryCommunicator)
            flat = torch.full((90_000,), float(comm.rank))
            comm.all_reduce_(flat).wait()
            assert (flat == 6).all()


def check_a_fabric_is_left_to_mpi():
    with opened(ROUND_ROBIN, fabric=True) as comm:
        assert isinstance(comm, HierarchicalCommunicator)
        assert type(comm._across).__name__ == "MPICommunicator"
    with opened(APART, fabric=True) as comm:
        assert type(comm).__name__ == "MPICommunicator"


def check_what_cannot_be_nested_is_one_error_on_every_rank():
    for nodes, text in (
        (UNEVEN, r"different numbers of ranks: 3 \(ranks 0, 1, 2\), 1 \(ranks 3\)"),
        (APART, "no two ranks share a node"),
        ([0, 0, 0, 0], "all 4 ranks are on one node"),
    ):
        with (
            raised_by_all(ConfigurationError, text),
            opened(nodes, topology="hierarchical"),
        ):
            pass


def check_every_backend_nests():
    for backend in ("auto", "mpi", "gloo"):
        with opened(ROUND_ROBIN, backend, "hierarchical") as comm:
            # exact in any order of additions; of several pieces; not a multiple of the number of
            # ranks
            inputs = [torch.arange(3_000_001).remainder(1000).float() + rank for rank in range(4)]
            total = torch.stack(inputs).sum(0)
            flat = comm.empty(3_000_001, torch.float32, CPU).copy_(inputs[comm.rank])
            comm.all_reduce_(flat, op=ReduceOp.AVG, name="whole").wait()
            assert torch.equal(flat, total / 4)
            flat.copy_(inputs[comm.rank])
            comm.reduce_scatter_(flat).wait()
            own = shard(flat, 4, comm.shard_index).clone()
            assert torch.equal(own, shard(total, 4, comm.shard_index))
            shard(flat.zero_(), 4, comm.shard_index).copy_(own)
            comm.all_gather_(flat).wait()
            assert torch.equal(flat, total)
            comm.broadcast_(flat.add_(comm.rank), src=3).wait()
            assert torch.equal(flat, total + 3)


def check_memory_is_asked_for_while_buckets_travel():
    """The request is collective in the node as the buckets are, and comes from another thread."""
    with opened(ROUND_ROBIN) as comm:
        works, buffers = [], []
        for index in range(8):
            buffers.append(comm.empty(300_000 + index, torch.float32, CPU).fill_(comm.rank))
            works.append(comm.all_reduce_(buffers[-1], name=f"bucket {index}"))
        for work in works:
            work.wait()
        assert all(torch.equal(flat, torch.full_like(flat, 6)) for flat in buffers)


def check_in_the_node_tensors_are_reduced_where_they_are():
    with opened(ROUND_ROBIN) as comm:
        assert isinstance(comm, HierarchicalCommunicator)
        flat = comm.empty(300_000, torch.float32, CPU)
        for level in (comm._intra_first, comm._intra_last):
            assert isinstance(level, SharedMemoryCommunicator)
            assert level.regions.location(flat[1000:]) > 0
            assert level.regions.location(torch.empty(300_000)) == 0
