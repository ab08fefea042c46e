"""Shared memory between real processes: MPI's, and plain ones of which one is killed."""

import os
import re

import pytest

from tests.battery import check_names
from tests.comm.backends.test_gloo import run_ranks_of

MODULE = "tests.checks.shared_memory"


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("check", check_names(MODULE))
def test_shared_memory(battery, world_size, check):
    battery(MODULE, world_size, check, OMPI_MCA_mpi_yield_when_idle="1")


RANK = """
import os, signal, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.comm.backends.shared_memory.communicator import open_shared_memory
from lightning_ring.comm.store_bootstrap import StoreBootstrap
from lightning_ring.errors import CollectiveError, PeerFailedError, RingError
rank, port, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
store = dist.TCPStore("127.0.0.1", port, 3, rank == 0, timeout=timedelta(seconds=120), wait_for_workers=False)
died = 0.0
def check():
    if died and time.monotonic() > died + 0.5:
        raise PeerFailedError("rank 1 was killed by signal 9")
policy = WaitPolicy(timedelta(seconds=1 if case == "absent" else 60), check)
bootstrap = StoreBootstrap(dist.PrefixStore("node", store), [0, 1, 2], rank, policy)
try:
    if case == "absent" and rank == 1:
        store.wait(["rank 0 is through", "rank 2 is through"])
        os._exit(0)
    store.set(f"rank {rank} is here", "")
    store.wait(["rank 0 is here", "rank 2 is here"])  # only rank 1 is late
    comm = open_shared_memory(bootstrap, policy)
    flat = comm.empty(1_000_000, torch.float32, torch.device("cpu")).fill_(1)
    comm.all_reduce_(flat).wait()
    assert flat[-1] == 3
    if rank == 1:
        comm.all_reduce_(flat, name="bucket 4")  # it is under way
        os.kill(os.getpid(), signal.SIGKILL)
    died = time.monotonic()
    comm.all_reduce_(flat, name="bucket 4").wait()
    comm.barrier()
except RingError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    store.set(f"rank {rank} is through", "")
    if rank == 0:  # the store is here
        time.sleep(0.2)
        store.wait(["rank 2 is through"])
        time.sleep(0.2)
    os._exit(7)
"""


def ours_in_dev_shm():
    return {name for name in os.listdir("/dev/shm") if "ring" in name}


@pytest.mark.ranks
def test_a_killed_rank_ends_the_others_and_leaves_nothing():
    before = ours_in_dev_shm()
    results = run_ranks_of(RANK, 3, "killed")
    assert results[1][0] == -9
    for code, output in (results[0], results[2]):
        assert code == 7, output
        assert re.search("PeerFailedError: rank 1 was killed by signal 9", output)
    assert ours_in_dev_shm() == before


@pytest.mark.ranks
def test_a_rank_that_never_comes_is_named():
    results = run_ranks_of(RANK, 3, "absent")
    for code, output in (results[0], results[2]):
        assert code == 7, output
        assert (
            "opening shared memory (3 ranks) did not finish within 1 s: still waiting for rank 1."
            in output
        )
