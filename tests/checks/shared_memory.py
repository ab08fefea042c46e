"""Checks of memory that the ranks of one node share, run on every rank of one mpirun by
`tests.battery`.
"""

import gc
import os
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from lightning_ring.comm.backends.gloo import GlooCommunicator
from lightning_ring.comm.backends.mpi import MPICommunicator
from lightning_ring.comm.backends.shared_memory.communicator import (
    SHORT_BYTES,
    SharedMemoryCommunicator,
    open_shared_memory,
)
from lightning_ring.comm.backends.shared_memory.memory import SLOT_BYTES
from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import CollectiveError
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks
from tests.checks.comm import WORLD, MPIBootstrap, assert_same_everywhere
from tests.checks.reductions import allowed, plain, tolerance, values
from tests.checks.world import said

CPU = torch.device("cpu")
# one piece, a piece and one element, several
SIZES = (SHORT_BYTES // 4 + 3, SLOT_BYTES // 4 + 1, 700_001)


def opened(**kwargs):
    return open_shared_memory(MPIBootstrap(), WaitPolicy(timedelta(seconds=60)), **kwargs)


def in_shared_memory(comm, like):
    tensor = comm.empty(like.numel(), like.dtype, CPU).copy_(like)
    assert tensor.nbytes <= SHORT_BYTES or comm.regions.location(tensor) > 0
    return tensor


def check_in_place_and_copied_give_the_same_bits():
    comm = opened()
    for dtype, op in allowed():
        inputs = values(70_003, dtype, comm.world_size)
        copied, shared = inputs[comm.rank].clone(), in_shared_memory(comm, inputs[comm.rank])
        comm.all_reduce_(copied, op=op).wait()
        comm.all_reduce_(shared, op=op).wait()
        assert_close(shared, plain(inputs, op), **tolerance(dtype))
        # there vector kernels and their tails round differently
        if not (dtype.is_complex and op is ReduceOp.PRODUCT):
            assert torch.equal(shared.view(torch.uint8), copied.view(torch.uint8)), (dtype, op)
        assert_same_everywhere(shared)
    comm.close()


def check_the_halves_and_broadcast_in_place():
    comm = opened()
    for numel in SIZES:
        inputs = values(numel, torch.float32, comm.world_size)
        expected = plain(inputs, ReduceOp.AVG)
        for make in (Tensor.clone, lambda like: in_shared_memory(comm, like)):
            flat = make(inputs[comm.rank])
            comm.reduce_scatter_(flat, op=ReduceOp.AVG).wait()
            own = shard(flat, comm.world_size, comm.rank).clone()
            assert_close(own, shard(expected, comm.world_size, comm.rank))
            flat.fill_(-1)
            shard(flat, comm.world_size, comm.rank).copy_(own)
            comm.all_gather_(flat).wait()
            assert_close(flat, expected)
            assert_same_everywhere(flat)
            comm.broadcast_(flat.add_(comm.rank), src=comm.world_size - 1).wait()
            assert_close(flat, expected + comm.world_size - 1)
            assert_same_everywhere(flat)
    comm.close()


def check_views_and_ranks_that_hold_it_elsewhere():
    comm = opened()
    memory = comm.empty(400_000, torch.float32, CPU).zero_()
    other = comm.empty(400_000, torch.float32, CPU).zero_()
    # the last: at another place on every other rank
    for start in (0, 64, 100_000 * (comm.rank % 2)):
        part = memory[start : start + 200_000].view(2, -1)
        part.fill_(comm.rank + 1)
        comm.all_reduce_(part).wait()
        assert (part == sum(range(1, comm.world_size + 1))).all()
    # not in one region everywhere, or in none
    mine = (memory, other, torch.zeros(400_000))[comm.rank % 3]
    mine.fill_(comm.rank + 1)
    comm.all_reduce_(mine).wait()
    assert (mine == sum(range(1, comm.world_size + 1))).all()
    comm.close()


def check_rounds_never_mix():
    """Many collectives in a row, of all sizes, each from another delay: a torn one would be a
    wrong sum.
    """
    comm = opened()
    generator = torch.Generator().manual_seed(1)  # the same on all ranks
    shared = comm.empty(300_000, torch.int64, CPU)
    for index in range(300):
        numel = int(torch.randint(1, 300_000, (1,), generator=generator)) if index % 3 else 17
        tensor = shared[:numel] if index % 2 else torch.empty(numel, dtype=torch.int64)
        tensor.fill_(index * (comm.rank + 1))
        work = comm.all_reduce_(tensor)
        if (index + comm.rank) % 5 == 0:
            time.sleep(0.001)
        work.wait()
        total = index * comm.world_size * (comm.world_size + 1) // 2
        assert (tensor == total).all(), (index, numel)
    comm.close()


def check_it_goes_on_while_nobody_waits():
    comm = opened()
    tensor = comm.empty(2_000_000, torch.float32, CPU).fill_(1)
    if comm.rank != 0:
        WORLD.Barrier()  # rank 0 calls first: the last one would do its part in the call itself
    work = comm.all_reduce_(tensor)
    if comm.rank == 0:
        WORLD.Barrier()
    else:
        work.wait()
    WORLD.Barrier()  # until then rank 0 computes, and does not call the communicator
    work.wait()
    assert (tensor == comm.world_size).all()
    comm.close()


def check_two_communicators_reach_the_same_memory():
    inward = opened()
    outward = opened(beside=inward)
    flat = inward.empty(300_000, torch.float32, CPU).fill_(WORLD.rank + 1)
    assert outward.regions.location(flat) > 0
    inward.reduce_scatter_(flat).wait()
    outward.all_gather_(flat).wait()
    assert (flat == sum(range(1, WORLD.size + 1))).all()
    inward.close()
    outward.close()


def mapped_bytes():
    """Address space of this process that is files of ours."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:lightning_ring" in line:
            start, stop = line.split()[0].split("-")
            total += int(stop, 16) - int(start, 16)
    return total


def open_files():
    return sum(
        "memfd:lightning_ring" in os.readlink(path)
        for path in Path("/proc/self/fd").iterdir()
        if path.exists()
    )


def check_memory_goes_with_the_last_tensor():
    named = set(os.listdir("/dev/shm"))
    gc.collect()
    before = mapped_bytes()
    comm = opened()
    opened_with = mapped_bytes()
    tensor = comm.empty(500_000, torch.float32, CPU)
    view = tensor[10:20]
    assert mapped_bytes() - opened_with >= 4 * 500_000 * comm.world_size
    del tensor
    assert mapped_bytes() - opened_with >= 4 * 500_000 * comm.world_size
    view.fill_(3)
    del view
    assert mapped_bytes() == opened_with
    kept = comm.empty(500_000, torch.float32, CPU)
    comm.close()
    del comm
    gc.collect()
    kept.fill_(1)  # still there after the communicator
    del kept
    assert mapped_bytes() <= before
    assert open_files() == 0
    assert not {name for name in set(os.listdir("/dev/shm")) - named if "ring" in name}


def opened_by_a_job(backend):
    job = connect(discover_ranks(), CPU, timedelta(seconds=80))
    comm = open_communicator(job, backend, CPU, timedelta(seconds=80), timedelta(seconds=60))
    total = torch.full((100_000,), 1.0)
    comm.all_reduce_(total).wait()
    assert (total == WORLD.size).all()
    return comm


def with_little_memory(run):
    """What is logged while the last rank may not make files of more than 1 MiB; memory files
    count.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if WORLD.rank == WORLD.size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with said() as messages:
            run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return messages


def check_too_little_memory_for_a_communicator():
    def run():
        assert open_shared_memory(MPIBootstrap()) is None

    lines = with_little_memory(run)
    assert len(lines) == (WORLD.rank == 0)
    if lines:
        assert "cannot share memory" in lines[0]
        assert (
            f"rank {WORLD.size - 1}: reserving 1 MiB failed: [Errno 27] File too large" in lines[0]
        )
        assert "travel by messages instead" in lines[0]


def check_too_little_memory_for_a_buffer():
    comm = opened()

    def run():
        for _ in range(2):
            tensor = comm.empty(1_000_000, torch.float32, CPU).fill_(1)
            assert comm.regions.location(tensor) == 0
            comm.all_reduce_(tensor).wait()
            assert (tensor == comm.world_size).all()

    lines = with_little_memory(run)
    assert len(lines) == (WORLD.rank == 0)
    assert all(
        "No shared memory for a buffer" in line and "File too large" in line for line in lines
    )
    # and where it is back, it is used
    assert comm.regions.location(comm.empty(1_000_000, torch.float32, CPU)) > 0
    comm.close()


def check_a_job_takes_shared_memory_by_itself_and_messages_where_asked_to():
    assert isinstance(opened_by_a_job("auto"), SharedMemoryCommunicator)
    assert isinstance(opened_by_a_job("gloo"), GlooCommunicator)
    assert isinstance(opened_by_a_job("mpi"), MPICommunicator)
    chosen = []
    lines = with_little_memory(lambda: chosen.append(opened_by_a_job("auto")))
    assert isinstance(chosen[0], MPICommunicator)
    assert len(lines) == (WORLD.rank == 0)
    assert isinstance(opened_by_a_job("auto"), SharedMemoryCommunicator)


def check_a_new_communicator_does_not_wait_for_what_a_peer_never_called():
    """As a refit after an exception that only some ranks had: the old one's timeout is 80 s."""
    for backend in ("auto", "gloo", "mpi"):
        comm = opened_by_a_job(backend)
        work = comm.all_reduce_(torch.ones(100_000), name="bucket 1") if WORLD.rank == 0 else None
        time.sleep(0.05)
        WORLD.Barrier()
        began = time.monotonic()
        opened_by_a_job(backend)
        assert time.monotonic() - began < 40, backend
        if work is not None:
            with pytest.raises(CollectiveError, match="replaced by a new one"):
                work.wait()
