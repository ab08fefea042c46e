"""Clocks of ranks that differ by a known offset, and those of one host."""

import time

from lightning_ring.timeline.clocks import read_clocks
from tests.thread_ranks import run_ranks

OFFSETS = [0.0, 12.5, -3.25, 12.5, 0.0]


def test_offsets_lie_within_their_error_and_shared_clocks_are_exact():
    def rank(comm):
        offset = OFFSETS[comm.rank]
        return read_clocks(
            comm, clock=lambda: time.perf_counter() + offset, identity=lambda: str(offset)
        )

    results = run_ranks(len(OFFSETS), rank)
    assert all(result == results[0] for result in results), "every rank knows all"
    for reading, offset in zip(results[0], OFFSETS, strict=True):
        assert abs(reading.offset - offset) <= reading.error + 1e-9
        assert reading.error < 0.2
        assert reading.shared == (offset == 0.0)
        assert not reading.shared or reading.offset == reading.error == 0.0
    assert results[0][1].offset == results[0][3].offset, "ranks of one clock"


def test_ranks_of_one_host_need_one_barrier():
    def rank(comm):
        barriers = []
        barrier, comm.barrier = comm.barrier, lambda **_: (barriers.append(1), barrier())
        readings = read_clocks(comm)
        return len(barriers), [
            (reading.offset, reading.error, reading.shared) for reading in readings
        ]

    assert run_ranks(3, rank) == [(1, [(0.0, 0.0, True)] * 3)] * 3
