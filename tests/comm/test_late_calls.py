"""Two ranks that call different collectives without headers: the late one tells, and both end."""

import re
from datetime import timedelta

import pytest

from lightning_ring.comm.late_calls import LateCalls
from lightning_ring.comm.waiting import WaitPolicy
from tests.comm.backends.test_gloo import run_ranks_of

RANKS = """
import os, sys, time
from datetime import timedelta
rank, port = int(sys.argv[1]), sys.argv[2]
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
                  GROUP_RANK="0", GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                  TORCHELASTIC_RUN_ID="late")
import torch
from lightning_ring.errors import CollectiveError
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks

cpu, minute = torch.device("cpu"), timedelta(seconds=60)
job = connect(discover_ranks(), cpu, minute)

def names(comm):
    comm.all_reduce_(torch.ones(1000), name=f"of rank {rank}").wait()

def sizes(comm):
    comm.all_reduce_(torch.ones(1000 + rank)).wait()

def kinds(comm):
    comm.barrier() if rank else comm.all_reduce_(torch.ones(1000)).wait()

def polled(comm):
    work = comm.all_reduce_(torch.ones(1000), name=f"of rank {rank}")
    while not work.done():
        time.sleep(0.01)
    work.wait()

def one_more(comm):
    works = [comm.all_reduce_(torch.ones(300_000), name=f"bucket {n}") for n in range(2 + rank)]
    [work.wait() for work in works]
    comm.barrier(name="end")

for diverge in (names, sizes, kinds, polled, one_more):
    comm = open_communicator(job, "gloo", cpu, minute, minute)
    for step in range(3):  # one rank after the other comes late: nothing that is wrong
        tensor = torch.full((1000,), float(rank))
        if step == 1 + rank:
            time.sleep(0.3)
        comm.all_reduce_(tensor, name=f"step {step}").wait()
        assert tensor.eq(1).all()
    began = time.monotonic()
    try:
        diverge(comm)
    except CollectiveError as error:
        print(diverge.__name__, f"{time.monotonic() - began < 5}:", error, flush=True)
job.close()
"""


@pytest.mark.ranks
def test_ranks_whose_calls_differ_get_the_same_error_within_seconds():
    outputs = [output for code, output in run_ranks_of(RANKS, 2, "")]
    assert outputs[0] == outputs[1]
    lines = outputs[0].splitlines()
    assert len(lines) == 5, outputs[0]
    for name, line in zip(("names", "sizes", "kinds", "polled", "one_more"), lines, strict=True):
        assert re.match(
            rf"{name} True: the ranks called different collectives \(call \d of this communicator\)"
            r": rank 0: \S.*; rank 1: \S.*\. All ranks must",
            line,
        ), line
    assert 'barrier "end"; rank 1: all_reduce "bucket 2" (sum, float32, 300000' in lines[4]


@pytest.fixture
def both():
    """The calls of two ranks that hear each other at once, and their policies."""
    policies = [WaitPolicy(timedelta(seconds=60)) for _ in range(2)]
    calls = [
        LateCalls(rank, policies[rank], lambda *told, rank=rank: calls[1 - rank].hear(*told))
        for rank in range(2)
    ]
    return calls, policies


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_has_not_called_yet_compares_when_it_does(both, first):
    calls, policies = both
    calls[first].begin(1, f"a{first}")
    calls[first].tell(1)
    assert policies[0].error is policies[1].error is None
    calls[1 - first].begin(1, f"a{1 - first}")
    texts = {str(policy.error) for policy in policies}
    assert len(texts) == 1
    assert "rank 0: a0; rank 1: a1" in texts.pop()


def test_a_late_word_about_a_call_that_is_over_means_nothing(both):
    calls, policies = both
    for each in calls:
        each.begin(1, "a")
    calls[1].end(1)
    calls[0].tell(1)
    calls[0].end(1)
    calls[0].tell(1)
    assert policies[0].error is policies[1].error is None
    assert not any(each._heard or each._under_way for each in calls)


def test_messages_of_different_calls_never_meet(both):
    calls, _ = both
    tags = [calls[0].tag(number, f"backward {number}: bucket 0") for number in range(1000)]
    assert len(set(tags)) == 1000
    assert all(2**29 <= tag < 2**30 for tag in tags)
    assert tags[:3] == [calls[1].tag(number, f"backward {number}: bucket 0") for number in range(3)]
