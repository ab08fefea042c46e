"""What is said about a collective that is late, from the ranks' statuses."""

from lightning_ring.job.stalls import RankStatus, stall_lines

LATE = 'all_reduce "bucket 4"'


def homes(world_size):
    return {
        rank: {"rank": rank, "host": f"node{rank // 4}", "pid": 100 + rank}
        for rank in range(world_size)
    }


def test_the_cause_comes_first_and_ranks_at_the_same_place_share_a_line():
    statuses = {rank: RankStatus(LATE, 60.0, progress="step 17") for rank in range(12)}
    for rank in (1, 9):
        stack = "\n      train.py:3 load: open(path)"
        statuses[rank] = RankStatus(last='all_reduce "bucket 3"', progress="step 17", stack=stack)
    del statuses[6]
    statuses[3] = RankStatus('all_reduce "bucket 3"', 61.0, progress="step 16")
    assert stall_lines(LATE, statuses, homes(12)) == [
        "ranks 1, 9 (hosts node0, node2) are not in it, step 17; the last that they finished was "
        'all_reduce "bucket 3". '
        "The main thread, innermost call first:\n      train.py:3 load: open(path)",
        "rank 6 (host node1, pid 106) is silent: it is stopped (SIGSTOP, a debugger), its host "
        "swaps, or C code holds its interpreter. `py-spy dump --native --pid 106` there shows "
        "where.",
        "ranks 0, 2, 4, 5, 7, 8, 10, 11 wait in it, step 17.",
        'rank 3 waits in all_reduce "bucket 3", step 16.',
    ]


def test_a_thousand_ranks_make_a_short_report():
    statuses = {
        rank: RankStatus(stack=f"\n      train.py:{rank} load: open(path)" * 8)
        for rank in range(500)
    }
    statuses |= {rank: RankStatus(LATE, 60.0) for rank in range(600, 1000)}
    lines = "\n".join(stall_lines(LATE, statuses, homes(1000))).splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) < 400
    assert lines[-3].startswith("ranks 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, … are not in it either")
    assert lines[-2].startswith("ranks 500, 501, ")
    assert lines[-1].startswith("ranks 600, 601, ")
