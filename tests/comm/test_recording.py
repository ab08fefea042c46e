"""A communicator that tells when its collectives were called, waited for, and over."""

import time

import torch

from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.comm.recording import RecordedCommunicator
from tests.processes import wait_for
from tests.thread_ranks import run_ranks


def test_records_of_every_collective():
    def rank(comm):
        records = []
        recorded = RecordedCommunicator(comm, [records.append])
        begin = time.perf_counter()
        tensors = [torch.full((5000,), float(comm.rank)) for _ in range(4)]
        works = [
            recorded.all_reduce_(tensors[0], op=ReduceOp.AVG, name="bucket 0"),
            recorded.reduce_scatter_(tensors[1], name="bucket 1"),
            recorded.all_gather_(tensors[2], name="parameters of bucket 1"),
            recorded.broadcast_(tensors[3], src=1),
        ]
        wait_for(lambda: all(work.done() for work in works))
        for work in works:
            work.wait()
            work.wait()
        return begin, records, tensors[0]

    for begin, records, averaged in run_ranks(2, rank):
        assert torch.equal(averaged, torch.full((5000,), 0.5))
        assert [(record.kind, record.name) for record in records] == [
            ("all_reduce", "bucket 0"),
            ("reduce_scatter", "bucket 1"),
            ("all_gather", "parameters of bucket 1"),
            ("broadcast", ""),
        ]
        for record in records:
            assert record.nbytes == 20_000
            assert (
                begin
                <= record.called
                <= record.returned
                <= record.waited_from
                <= record.waited_until
            )
            assert record.called <= record.ended < record.waited_from, (
                "it ended before it was waited for"
            )


def test_without_listeners_the_work_is_the_communicators_own():
    def rank(comm):
        listeners = []
        recorded = RecordedCommunicator(comm, listeners)
        work = recorded.all_reduce_(torch.ones(3))
        work.wait()
        plain = type(work) is type(comm.all_reduce_(torch.ones(3)))
        listeners.append(lambda record: None)  # switched on in the middle
        return plain, type(recorded.all_reduce_(torch.ones(3))) is type(work)

    assert run_ranks(2, rank) == [(True, False)] * 2
