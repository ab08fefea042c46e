"""Checks of the communicators between processes, run on every rank of one mpirun by
`tests.battery`.
"""

import contextlib
import itertools
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from lightning_ring.comm.backends.gloo import GlooCommunicator, open_torch_communicator
from lightning_ring.comm.backends.shared_memory.communicator import open_shared_memory
from lightning_ring.comm.communicator import ReduceOp, shard
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import CollectiveError, ConfigurationError, PeerFailedError, RingError
from lightning_ring.job.communicators import open_hierarchical
from tests.checks.ranks import WORLD
from tests.checks.reductions import (
    COMPLEX,
    FLOATS,
    HALVES,
    INTEGERS,
    allowed,
    plain,
    rounded_once,
    tolerance,
    values,
)
from tests.checks.world import open_gloo, raised_by_all
from tests.refusals import refused

CPU = torch.device("cpu")
BACKENDS = ["gloo", "mpi", "shared memory"] + ["hierarchical"] * (WORLD.size == 4)
# Every dtype goes through the others on up to three ranks; a ring of four is the same ring (and
# `test_ring.py` has it)
EVERY_DTYPE = ["hierarchical"] if WORLD.size == 4 else BACKENDS


class MPIBootstrap:
    """How the ranks of these checks meet to share memory."""

    rank = WORLD.rank
    world_size = WORLD.size

    def all_gather_object(self, obj):
        return WORLD.allgather(obj)


@contextlib.contextmanager
def opened(backend, timeout=60.0):
    """A new communicator over all ranks."""
    policy = WaitPolicy(timedelta(seconds=timeout))
    if backend == "mpi":
        from lightning_ring.comm.backends.mpi import MPICommunicator

        comm = MPICommunicator(policy=policy)
    elif backend == "shared memory":
        comm = open_shared_memory(MPIBootstrap(), policy)
    elif backend == "hierarchical":
        open_gloo()
        comm = open_hierarchical([[0, 2], [1, 3]], WORLD.rank, "mpi", "gloo", policy, None)
    else:
        open_gloo()
        comm = open_torch_communicator("gloo", policy)
    yield comm
    comm.close()


def each(backends=BACKENDS):
    for backend in backends:
        with opened(backend) as comm:
            yield comm


def assert_same_everywhere(tensor):
    bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    assert set(WORLD.allgather(bits)) == {bits}


def check_every_dtype_and_op_equals_a_plain_reduction():
    for comm in each(EVERY_DTYPE):
        outputs = []
        for dtype, op in allowed():
            for numel in (7, 5003):  # short: exchanged directly; long: the ring
                inputs = values(numel, dtype, comm.world_size)
                output = inputs[comm.rank].clone()
                comm.all_reduce_(output, op=op, name=f"{dtype} {op.name}").wait()
                assert_close(output, plain(inputs, op), **tolerance(dtype))
                outputs.append(output.view(torch.uint8))
        assert_same_everywhere(torch.cat(outputs))


def check_tensors_of_inference_mode():
    """Lightning evaluates in that mode; changing its tensors in a thread that is not in it is an
    error.
    """
    for comm in each():
        with torch.inference_mode():
            tensor = torch.ones(200_000)
            work = comm.all_reduce_(tensor)
        work.wait()
        assert (tensor == comm.world_size).all()


def check_average_of_two_ranks_has_the_bits_of_distributed_data_parallel():
    for comm in each():
        mine = torch.randn(70_001, generator=torch.Generator().manual_seed(comm.rank))
        theirs = mine / comm.world_size  # what DistributedDataParallel does, with Gloo
        dist.all_reduce(theirs)
        comm.all_reduce_(mine, op=ReduceOp.AVG).wait()
        if comm.world_size <= 2 or isinstance(comm, GlooCommunicator):
            assert torch.equal(mine, theirs)
        assert_close(mine, theirs)
        assert_same_everywhere(mine)


def check_the_halves():
    for comm in each(EVERY_DTYPE):
        outputs = []
        for dtype in FLOATS + INTEGERS + COMPLEX:
            for numel in (0, 1, 7, 70_001):
                inputs = values(numel, dtype, comm.world_size)
                expected = plain(inputs, ReduceOp.SUM)
                flat = inputs[comm.rank].clone()
                comm.reduce_scatter_(flat).wait()
                own = shard(flat, comm.world_size, comm.shard_index)
                assert_close(
                    own, shard(expected, comm.world_size, comm.shard_index), **tolerance(dtype)
                )
                comm.all_gather_(flat).wait()
                assert_close(flat, expected, **tolerance(dtype))
                outputs.append(flat.view(torch.uint8))
        assert_same_everywhere(torch.cat(outputs))


def check_16_bit_sums_are_taken_in_float32_and_rounded_once():
    # which rounds once a level
    for comm in each([backend for backend in BACKENDS if backend != "hierarchical"]):
        for dtype, op, numel in itertools.product(
            HALVES, (ReduceOp.SUM, ReduceOp.AVG), (9, 40_003)
        ):
            inputs = values(numel, dtype, comm.world_size)
            expected = rounded_once(inputs, op)
            for whole in (
                inputs[comm.rank].clone(),
                comm.empty(numel, dtype, CPU).copy_(inputs[comm.rank]),
            ):
                half = whole.clone()
                comm.all_reduce_(whole, op=op).wait()
                assert torch.equal(whole, expected), (comm, dtype, op)
                comm.reduce_scatter_(half, op=op).wait()
                own, right = (
                    shard(flat, comm.world_size, comm.shard_index) for flat in (half, expected)
                )
                assert torch.equal(own, right), (comm, dtype, op)


def check_many_in_flight():
    for comm in each():
        tensors = [torch.full((1 + 3000 * index,), float(comm.rank + index)) for index in range(30)]
        works = [
            comm.all_reduce_(tensor, name=f"bucket {index}") for index, tensor in enumerate(tensors)
        ]
        for index in reversed(range(30)):  # in any order
            works[index].wait()
            total = comm.world_size * index + comm.world_size * (comm.world_size - 1) / 2
            assert torch.equal(tensors[index], torch.full_like(tensors[index], total))
            assert works[index].done()


def numbers(tensor):
    return tensor.to(torch.cfloat).tolist()


def check_gather_exchange_and_broadcast():
    for comm in each():
        ranks = range(comm.world_size)
        for dtype in (
            torch.float32,
            torch.bfloat16,
            torch.bool,
            torch.int16,
            torch.complex64,
            torch.float8_e4m3fn,
        ):
            mine = torch.tensor([[comm.rank % 2, 1]]).to(dtype)
            gathered = comm.all_gather(mine)
            assert [*map(numbers, gathered)] == [[[rank % 2, 1]] for rank in ranks]
            sent = [torch.full((comm.rank + 2 * peer,), comm.rank % 2).to(dtype) for peer in ranks]
            received = [torch.empty(peer + 2 * comm.rank, dtype=dtype) for peer in ranks]
            comm.all_to_all(sent, received).wait()
            for peer in ranks:
                assert numbers(received[peer]) == [peer % 2] * (peer + 2 * comm.rank)
            for src in ranks:
                tensor = torch.full((3, 2), comm.rank % 2).to(dtype)
                comm.broadcast_(tensor, src=src).wait()
                assert numbers(tensor) == [[src % 2] * 2] * 3
        comm.all_reduce_(torch.tensor(1.0)).wait()  # no dimension
        comm.barrier()


def check_objects():
    for comm in each():
        mine = {
            "rank": comm.rank,
            "state": torch.full((comm.rank * 1000,), 7.0),
            "text": "ß" * 300_000,
        }
        for rank, theirs in enumerate(comm.all_gather_object(mine)):
            assert theirs["rank"] == rank
            assert torch.equal(theirs["state"], torch.full((rank * 1000,), 7.0))
        for src in range(comm.world_size):
            assert comm.broadcast_object(mine if comm.rank == src else None, src=src)["rank"] == src
        if comm.world_size > 1:
            with pytest.raises(
                CollectiveError, match="rank 0 tried to send an object that cannot be pickled"
            ):
                comm.broadcast_object(lambda: None)
            comm.barrier()


def check_barrier_waits_for_the_last():
    for comm in each():
        if comm.rank == comm.world_size - 1:
            time.sleep(0.3)
        arrived = time.monotonic()  # one clock for all processes of a machine
        comm.barrier()
        left = time.monotonic()
        assert left >= max(WORLD.allgather(arrived))


def check_different_tensors_are_an_error_on_every_rank():
    for backend in BACKENDS if WORLD.size > 1 else []:
        for numel, dtype in (
            (1000 + 1000 * (WORLD.rank == 1), torch.float32),
            (9, (torch.int32, torch.float32)[WORLD.rank % 2]),
        ):
            with opened(backend) as comm:
                with raised_by_all(CollectiveError, "bucket 5") as caught:
                    comm.all_reduce_(torch.ones(numel, dtype=dtype), name="bucket 5").wait()
                for text in (str(numel), str(dtype).removeprefix("torch.")):
                    assert text in str(caught.value)
                with pytest.raises(CollectiveError) as again:
                    comm.all_reduce_(torch.ones(3)).wait()
                assert again.value is caught.value


def check_other_calls_are_an_error_on_every_rank():
    for backend in BACKENDS if WORLD.size > 1 else []:
        with opened(backend) as comm:
            mine = (
                comm.barrier
                if comm.rank == 0
                else comm.all_reduce_(torch.ones(100_000), name="loss").wait
            )
            with raised_by_all(CollectiveError, r'rank 0: .*barrier.*: all_reduce "loss"'):
                mine()


class _Unpickled:
    """Tells when it is unpickled."""

    seen = False

    def __setstate__(self, state):
        _Unpickled.seen = True


def check_objects_of_different_calls_are_an_error_before_they_are_unpickled():
    sent = _Unpickled()
    sent.some = "state"
    for backend in BACKENDS if WORLD.size > 1 else []:
        for call in ("all_gather_object", "broadcast_object", "barrier"):
            with opened(backend) as comm:
                mine = "save_checkpoint" if comm.rank == 0 else "next batch"
                arguments = () if call == "barrier" else (sent,)
                with raised_by_all(CollectiveError, r"rank 0: .*save_checkpoint.*: .*next batch"):
                    getattr(comm, call)(*arguments, name=mine)
    assert not _Unpickled.seen


def check_past_the_timeout_the_collective_and_the_missing_rank_are_named():
    for backend in BACKENDS if WORLD.size > 1 else []:
        with opened(backend) as comm:
            comm._policy.timeout = timedelta(seconds=1.5)
            WORLD.Barrier()  # only rank 1 is late
            if comm.rank != 1:
                with pytest.raises(
                    CollectiveError,
                    match=r'all_reduce "bucket 9".*within 1.5 s.*waiting for rank 1\b',
                ):
                    comm.all_reduce_(torch.ones(100_000), name="bucket 9").wait()
                with pytest.raises(CollectiveError, match="bucket 9"):
                    comm.barrier()
            WORLD.Barrier()


def check_the_check_ends_a_wait():
    for backend in BACKENDS if WORLD.size > 1 else []:
        with opened(backend, timeout=80) as comm:
            if comm.rank != 1:
                begin = time.monotonic()

                def check(begin=begin):
                    if time.monotonic() > begin + 0.2:
                        raise PeerFailedError("rank 1 was killed by signal 9")

                comm._policy.check = check
                for call in (comm.barrier, lambda: comm.all_gather_object(1)):
                    with pytest.raises(PeerFailedError, match="rank 1 was killed"):
                        call()
                assert time.monotonic() < begin + 60  # before the timeout
            WORLD.Barrier()


def check_refusals():
    for comm in each():
        for tensor in (
            torch.ones(4, 4).t(),
            torch.zeros(3, dtype=torch.bool),
            torch.zeros(3, device="meta"),
        ):
            with pytest.raises(ConfigurationError):
                comm.all_reduce_(tensor)
        with refused("ranks go from 0"):
            comm.broadcast_(torch.zeros(3), src=comm.world_size)
        with refused("0 inputs and 0 outputs"):
            comm.all_to_all([], [])
        comm.barrier()  # nothing was broken


def check_closed_twice():
    for comm in each():
        tensor = torch.ones(500_000)
        work = comm.all_reduce_(tensor)
        comm.close()
        comm.close()
        work.wait()
        assert tensor[-1] == comm.world_size
        if comm.world_size > 1:
            with pytest.raises(RingError, match="closed"):
                comm.barrier()
