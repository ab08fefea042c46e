"""The link between two hosts is cut: two hosts, each a network namespace."""

import contextlib
import subprocess
import sys
import time

import pytest

from tests import forked
from tests.hosts import INTERFACE
from tests.processes import ROOT, started, wait_for

SCRIPT = str(ROOT / "tests" / "job" / "rank_script.py")


NESTED = """
import sys
from datetime import timedelta
from pathlib import Path
import torch
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks
minute = timedelta(minutes=1)
info = discover_ranks()
job = connect(info, torch.device("cpu"), minute)
open_communicator(job, "auto", torch.device("cpu"), minute, minute, "hierarchical")
while True:
    job.communicator.all_reduce_(torch.ones(1_000_000), name="bucket 3").wait()
    Path(sys.argv[1], f"nested.{info.rank}").touch()
"""


def start_ranks(cleanup, hosts, address, actions, folder):
    """A plain process on each host."""
    found = []
    for rank, (host, action) in enumerate(zip(hosts.names, actions, strict=True)):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        place |= {"MASTER_ADDR": address, "MASTER_PORT": "29400"}
        command = hosts.on(host, *forked.python(), SCRIPT, action, str(folder))
        found.append(cleanup.enter_context(started(command, **place)))
    return found


@pytest.mark.netns
def test_both_sides_end_when_the_link_is_cut(hosts, tmp_path):
    """Two jobs: plain processes, rank 0 waiting in a loop that checks, rank 1 in one that nothing
    can interrupt; and under mpirun two ranks on each host that reduce in the node, then across."""
    with contextlib.ExitStack() as cleanup:
        address = hosts.address(hosts.names[0])
        ranks = start_ranks(cleanup, hosts, address, ("wait", "sleep"), tmp_path)
        command = hosts.mpirun(4, sys.executable, "-c", NESTED, str(tmp_path))
        nested = cleanup.enter_context(started(command, OMPI_MCA_mpi_yield_when_idle="1"))
        wait_for(lambda: len([*tmp_path.glob("pid.*"), *tmp_path.glob("nested.*")]) == 6, 90)
        time.sleep(1)
        hosts.cut(hosts.names[1])
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
        output = nested.communicate(timeout=120)[0]
        deadline = time.monotonic() + 60  # a shell that was to end mpirun sleeps for some seconds
        while left := [name for host in hosts.names for name in hosts.running(host)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.2)
    for rank in range(2):
        assert ranks[rank].returncode == 1, outputs[rank]
        assert f"rank {1 - rank} (host" in outputs[rank]
        assert "the link to it is cut" in outputs[rank]
    assert nested.returncode != 0, output
    assert f"(host {hosts.names[1]}" in output
    assert "the link to it is cut" in output
    assert not left, f"{left}\n{output}"


@pytest.mark.netns
def test_hosts_that_have_ipv6_addresses_alone(hosts, tmp_path):
    with contextlib.ExitStack() as cleanup:
        for number, host in enumerate(hosts.names):
            for words in ("-4 addr flush", f"addr add fd78::{number + 1}/64 nodad"):
                subprocess.run(
                    ["ip", "-n", host, *words.split(), "dev", INTERFACE], check=True, timeout=20
                )
        ranks = start_ranks(cleanup, hosts, "fd78::1", ("finish", "finish"), tmp_path)
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
