"""Jobs one after the other in one process, and a job that goes on with fewer ranks
(`membership_script.py`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.processes import ROOT, mpirun_command, mpirun_path, run

SCRIPT = str(ROOT / "tests" / "job" / "membership_script.py")
RINGRUN = [sys.executable, "-m", "lightning_ring.cli.ringrun"]
pytestmark = pytest.mark.ranks


def check_results(folder: Path, classes: list[str]) -> None:
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(3)]
    for rank, result in enumerate(results):
        assert result["closed"] == {"threads": [], "group": False, "GLOO": False}
        assert result["sums"][:2] == [[6.0] * (len(classes) + 1)] * 2
        one, two, *later = result["fits"]
        assert (one["rank"], one["world_size"], one["generation"]) == (rank, 3, 0)
        assert two == one | {"generation": 1}  # the same bits
        if rank == 0:
            assert not later
            continue
        assert result["sums"][2] == [3.0] * (len(classes) + 1)
        assert [fit["communicator"] for fit in later] == classes
        assert {(fit["rank"], fit["world_size"], fit["generation"]) for fit in later} == {
            (rank - 1, 2, 2)
        }
    assert [fit["sum"] for fit in results[1]["fits"]] == [fit["sum"] for fit in results[2]["fits"]]


@pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python")
def test_rank_0_leaves_a_job_of_mpi(tmp_path: Path) -> None:
    command = mpirun_command(3, *forked.python(), SCRIPT, str(tmp_path), "mpi", "auto", "gloo")
    done = run(command, OMPI_MCA_mpi_yield_when_idle="1")
    assert done.returncode == 0, done.stdout[-4000:]
    check_results(tmp_path, ["MPICommunicator", "SharedMemoryCommunicator", "GlooCommunicator"])


def test_rank_0_leaves_a_job_of_plain_processes_and_a_later_failure_ends_the_others(
    tmp_path: Path,
) -> None:
    done = run(
        [*RINGRUN, "-n", "3", "--no-mpi", *forked.python(), SCRIPT, str(tmp_path), "auto", "gloo"],
        FAIL="1",
    )
    check_results(tmp_path, ["SharedMemoryCommunicator", "GlooCommunicator"])
    assert done.returncode == 1, done.stdout[-4000:]
    assert "ValueError: after rank 0 has left" in done.stdout
    assert done.stdout.count("Traceback") == 1, done.stdout[-4000:]
    assert "rank 1 of generation 2 (host" in done.stdout
    assert "rank 0 of generation 2 ends: rank 1 (host" in done.stdout
