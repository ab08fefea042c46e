"""Thread-ranks: the whole communicator, and what happens when a rank fails, diverges or stays
away.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch

from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.errors import RingError
from tests.refusals import refused
from tests.thread_ranks import run_ranks


def test_a_collective_does_not_block_its_caller():
    reached = threading.Event()

    def rank(comm):
        if comm.rank == 1:
            assert reached.wait(10)  # set by rank 0 only after it has started its own half
        work = comm.all_reduce_(torch.ones(10_000))
        reached.set()
        work.wait()

    run_ranks(2, rank)


def all_raise(fn):
    """The error of every rank of ``fn``, which must raise on all of them."""

    def rank(comm):
        with pytest.raises(RingError) as caught:
            fn(comm)
        with pytest.raises(RingError) as again:
            comm.barrier()
        assert again.value is caught.value  # broken communicators stay so
        return caught.value

    return run_ranks(3, rank)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            torch.ones(3),
            "rank 1 sends 12 bytes of float32 to rank 2, which expects 8 bytes of float32",
        ),
        (
            torch.ones(2).int(),
            "rank 0 sends 8 bytes of float32 to rank 1, which expects 8 bytes of int32",
        ),
    ],
)
def test_all_to_all_of_another_form_than_expected_is_an_error_on_every_rank(other, words):
    def diverge(comm):
        comm.all_to_all([torch.empty(0)] * 3, [torch.empty(0, dtype=other.dtype)] * 3).wait()
        inputs = [torch.empty(2)] * 3
        if comm.rank == 1:
            inputs = [torch.empty(2, dtype=other.dtype)] * 2 + [other]
        outputs = [torch.empty(2, dtype=inputs[0].dtype) for _ in range(3)]
        comm.all_to_all(inputs, outputs).wait()

    errors = all_raise(diverge)
    assert {str(error) for error in errors} == {str(errors[0])}
    assert words in str(errors[0])


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
        with refused(f"cannot reduce {dtype} by {op.name}"):
            comm.all_reduce_(torch.zeros(4).to(dtype), op=op)

    run_ranks(2, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [100, 200_000])
def test_an_average_of_two_short_tensors_has_the_bits_of_ddp(dtype, numel):
    """It divides before it sums: neither overflows at large values, and both lose the last bit of
    subnormal ones.
    """
    limits = torch.finfo(dtype)
    scales = torch.tensor([limits.max, limits.tiny, limits.tiny * limits.eps * 5, 1.0], dtype=dtype)
    inputs = [
        torch.rand(numel, dtype=dtype, generator=torch.Generator().manual_seed(rank))
        * scales.repeat(numel // 4)
        for rank in range(2)
    ]

    def rank(comm):
        tensor = inputs[comm.rank].clone()
        comm.all_reduce_(tensor, op=ReduceOp.AVG).wait()
        return tensor

    for averages in run_ranks(2, rank):
        assert torch.equal(averages, inputs[0] / 2 + inputs[1] / 2)


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
        before_any_ended = told.count(1)  # headers; short tensors go with them
        called.set()
        for work in works:
            work.wait()
        return before_any_ended

    assert run_ranks(2, rank) == [3, 3]


def test_views_that_hold_other_numbers_than_they_show_are_refused():
    def rank(comm):
        with refused("conjugate"):
            comm.all_reduce_(torch.ones(3, dtype=torch.complex64).conj())
        plain = torch.full((3,), 1 + comm.rank * 1j, dtype=torch.complex64)
        assert comm.all_gather(plain.conj())[1].tolist() == [1 - 1j] * 3, "a copy resolves it"

    run_ranks(2, rank)


def test_of_two_threads_that_call_the_first_to_announce_sends_first():
    def rank(comm):
        tensors = [torch.full((50_000,), float(value)) for value in (1, 10)]
        calls = [
            threading.Thread(target=lambda tensor=tensor: comm.all_reduce_(tensor).wait())
            for tensor in tensors
        ]
        announce, announced = comm._announce, threading.Event()

        def announce_slowly(what):
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
