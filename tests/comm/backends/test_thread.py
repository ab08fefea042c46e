"""Thread-ranks: the whole communicator, and what happens when a rank fails, diverges or stays
away.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch

from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.errors import CollectiveError, ConfigurationError, PeerFailedError, RingError
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_collective(world_size):
    def rank(comm):
        tensor = torch.full((2, 3), float(comm.rank))
        comm.all_reduce_(tensor, op=ReduceOp.MAX).wait()
        gathered = comm.all_gather(torch.tensor([comm.rank]))
        sent = [torch.full((comm.rank + peer,), comm.rank) for peer in range(world_size)]
        received = [torch.empty(comm.rank + peer, dtype=torch.int64) for peer in range(world_size)]
        comm.all_to_all(sent, received).wait()
        comm.barrier()
        objects = comm.all_gather_object({"rank": comm.rank, "long": "x" * comm.rank * 1000})
        return (
            tensor,
            gathered,
            received,
            objects,
            comm.broadcast_object(f"from {comm.rank}", src=world_size - 1),
        )

    for index, (tensor, gathered, received, objects, text) in enumerate(
        run_ranks(world_size, rank)
    ):
        assert torch.equal(tensor, torch.full((2, 3), world_size - 1.0))
        assert [int(value) for value in gathered] == list(range(world_size))
        assert [value.tolist() for value in received] == [
            [peer] * (index + peer) for peer in range(world_size)
        ]
        assert objects == [{"rank": peer, "long": "x" * peer * 1000} for peer in range(world_size)]
        assert text == f"from {world_size - 1}"


def test_many_collectives_in_flight_end_in_order():
    def rank(comm):
        tensors = [torch.full((5000,), float(index + comm.rank)) for index in range(40)]
        works = [
            comm.all_reduce_(tensor, name=f"bucket {index}") for index, tensor in enumerate(tensors)
        ]
        works[-1].wait()
        assert all(work.done() for work in works)
        return [tensor[0].item() for tensor in tensors]

    assert run_ranks(3, rank)[2] == [3.0 * index + 3 for index in range(40)]


def test_a_collective_does_not_block_its_caller():
    reached = threading.Event()

    def rank(comm):
        if comm.rank == 1:
            assert reached.wait(10)  # set by rank 0 only after it has started its own half
        work = comm.all_reduce_(torch.ones(10_000))
        reached.set()
        work.wait()

    run_ranks(2, rank)


def test_the_error_of_a_rank_ends_the_others_at_once():
    seen = []

    def rank(comm):
        if comm.rank == 1:
            raise KeyError("broken sample")
        try:
            comm.barrier()
        except PeerFailedError as error:
            seen.append(str(error))
            raise

    began = time.monotonic()
    with pytest.raises(KeyError, match="broken sample"):
        run_ranks(3, rank)
    assert time.monotonic() - began < 30  # of 60
    assert len(seen) == 2
    assert all("rank 1 failed: KeyError: 'broken sample'" in text for text in seen)


def both_raise(fn, world_size=3):
    """The error of every rank of ``fn``, which must raise on all of them."""

    def rank(comm):
        with pytest.raises(RingError) as caught:
            fn(comm)
        with pytest.raises(RingError) as again:
            comm.barrier()
        assert again.value is caught.value  # broken communicators stay so
        return caught.value

    return run_ranks(world_size, rank)


@pytest.mark.parametrize(
    ("numels", "dtypes"),
    [((1000, 1000, 1001), ("float32",) * 3), ((1000,) * 3, ("float32", "float64", "float32"))],
)
def test_a_different_tensor_is_an_error_on_every_rank(numels, dtypes):
    def diverge(comm):
        tensor = torch.ones(numels[comm.rank], dtype=getattr(torch, dtypes[comm.rank]))
        comm.all_reduce_(tensor, name="bucket 7").wait()

    errors = both_raise(diverge)
    assert len({str(error) for error in errors}) == 1
    for part in ("bucket 7", *map(str, numels), *dtypes):
        assert part in str(errors[0])


def test_different_calls_are_an_error_on_every_rank():
    def diverge(comm):
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.all_reduce_(torch.ones(4), op=ReduceOp.AVG, name="loss").wait()

    errors = both_raise(diverge)
    assert "rank 0: barrier; ranks 1, 2: all_reduce" in str(errors[0])


def test_all_to_all_of_other_sizes_than_expected_is_an_error_on_every_rank():
    def diverge(comm):
        outputs = [torch.empty(2) for _ in range(3)]
        inputs = [torch.empty(3 if (comm.rank, peer) == (1, 2) else 2) for peer in range(3)]
        comm.all_to_all(inputs, outputs).wait()

    errors = both_raise(diverge)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert "rank 1 sends 12 bytes of float32 to rank 2, which expects 8 bytes of float32" in str(
        errors[0]
    )


def test_past_the_timeout_the_collective_and_the_missing_ranks_are_named():
    over = threading.Barrier(3)

    def rank(comm):
        comm.barrier()  # only rank 1 is late
        comm._policy.timeout = timedelta(seconds=0.5)
        try:
            if comm.rank != 1:
                text = r'all_reduce "bucket 3".*within 0.5 s.*waiting for rank 1\b'
                with pytest.raises(CollectiveError, match=text):
                    comm.all_reduce_(torch.ones(3), name="bucket 3").wait()
        finally:
            over.wait(60)

    run_ranks(3, rank)


def test_a_stall_is_reported_before_it_is_an_error(caplog):
    def rank(comm):
        comm.barrier()  # only rank 1 is late
        comm._policy.stall_warning = timedelta(seconds=0.1)
        until = time.monotonic() + 50
        while comm.rank == 1 and len(caplog.records) < 2 and time.monotonic() < until:
            time.sleep(0.01)
        comm.all_reduce_(torch.ones(3), name="bucket 0").wait()

    run_ranks(3, rank)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2  # ranks 0 and 2, once each
    assert all('all_reduce "bucket 0"' in line and "for rank 1;" in line for line in lines)


def test_check_ends_a_wait_with_its_own_error():
    failed = threading.Event()

    def check():
        if failed.is_set():
            raise PeerFailedError("rank 1 was killed")

    def rank(comm):
        if comm.rank == 1:
            time.sleep(0.2)
            failed.set()
            return
        comm._policy.check = check
        work = comm.all_reduce_(torch.ones(3))
        for _ in range(2):
            with pytest.raises(PeerFailedError, match="rank 1 was killed"):
                work.wait()
        with pytest.raises(PeerFailedError, match="rank 1 was killed"):
            comm.all_gather_object(1)

    run_ranks(2, rank)


def test_an_object_that_cannot_be_pickled_is_an_error_on_every_rank():
    def rank(comm):
        with pytest.raises(
            CollectiveError, match="rank 0 tried to send an object that cannot be pickled"
        ):
            comm.broadcast_object(lambda: None if comm.rank == 0 else 1)
        return comm.broadcast_object(comm.rank + 5)  # not broken: the ranks still agree

    assert run_ranks(2, rank) == [5, 5]


@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        (torch.bool, ReduceOp.SUM),
        (torch.complex64, ReduceOp.MAX),
        (torch.float8_e4m3fn, ReduceOp.SUM),
    ],
)
def test_what_cannot_be_reduced_is_refused(dtype, op):
    def rank(comm):
        with pytest.raises(ConfigurationError, match=f"cannot reduce {dtype} by {op.name}"):
            comm.all_reduce_(torch.zeros(4).to(dtype), op=op)

    run_ranks(2, rank)


def test_strided_views_and_wrong_ranks_are_refused():
    def rank(comm):
        with pytest.raises(ConfigurationError, match="contiguous"):
            comm.all_reduce_(torch.zeros(4, 4).t())
        with pytest.raises(ConfigurationError, match="src=2, but ranks go from 0 to 1"):
            comm.broadcast_(torch.zeros(4), src=2)
        with pytest.raises(ConfigurationError, match="1 inputs and 2 outputs for 2 ranks"):
            comm.all_to_all([torch.zeros(1)], [torch.zeros(1)] * 2)

    run_ranks(2, rank)


def test_closed_twice_and_used_afterwards():
    def rank(comm):
        tensor = torch.ones(100_000)
        work = comm.all_reduce_(tensor)
        comm.close()  # finishes what is under way
        comm.close()
        work.wait()
        assert tensor[-1] == 2
        with pytest.raises(CollectiveError, match="closed"):
            comm.barrier()

    run_ranks(2, rank)


def test_the_others_are_told_of_a_call_while_earlier_ones_are_under_way():
    """Were they told when its turn comes, the wire would be idle for as long as that takes."""

    def rank(comm):
        called, told = threading.Event(), []
        wait, send = comm.transport.wait, comm.transport.isend

        def wait_for_all_calls(requests):
            assert called.wait(10)
            wait(requests)

        def counted_send(tensor, dst, tag=0):
            told.append(tag)
            return send(tensor, dst, tag)

        comm.transport.wait, comm.transport.isend = wait_for_all_calls, counted_send
        works = [comm.all_reduce_(torch.ones(10_000), name=f"bucket {index}") for index in range(3)]
        before_any_ended = list(told)
        called.set()
        for work in works:
            work.wait()
        return before_any_ended

    assert run_ranks(2, rank) == [[1, 1, 1]] * 2


def test_all_to_all_of_two_dtypes_of_one_size_is_an_error() -> None:
    def rank(comm) -> None:
        dtype = torch.float32 if comm.rank == 0 else torch.int32
        # nothing to take for another
        comm.all_to_all([torch.empty(0, dtype=dtype)] * 2, [torch.empty(0)] * 2).wait()
        comm.all_to_all(
            [torch.ones(4, dtype=dtype)] * 2, [torch.ones(4, dtype=dtype) for _ in range(2)]
        ).wait()

    with pytest.raises(
        CollectiveError,
        match=r"0 sends 16 bytes of float32 to rank 1, which expects 16 bytes of int",
    ):
        run_ranks(2, rank)


def test_views_that_hold_other_numbers_than_they_show_are_refused() -> None:
    def rank(comm) -> None:
        with pytest.raises(ConfigurationError, match="conjugate"):
            comm.all_reduce_(torch.ones(3, dtype=torch.complex64).conj())
        plain = torch.full((3,), 1 + comm.rank * 1j, dtype=torch.complex64)
        assert comm.all_gather(plain.conj())[1].tolist() == [1 - 1j] * 3, "a copy resolves it"

    run_ranks(2, rank)


def test_of_two_threads_that_call_the_first_to_announce_sends_first() -> None:
    def rank(comm) -> list[float]:
        tensors = [torch.full((50_000,), float(value)) for value in (1, 10)]
        calls = [
            threading.Thread(target=lambda tensor=tensor: comm.all_reduce_(tensor).wait())
            for tensor in tensors
        ]
        announce, announced = comm._announce, threading.Event()

        def announce_slowly(what: str):
            agree = announce(what)
            announced.set()
            if threading.current_thread() is calls[0] and comm.rank == 0:
                time.sleep(0.4)
            return agree

        comm._announce = announce_slowly
        for call in calls:
            call.start()
            assert announced.wait(60)  # rank 1 calls in this order too
        for call in calls:
            call.join()
        return [float(tensor[0]) for tensor in tensors]

    assert run_ranks(2, rank) == [[2, 20]] * 2
