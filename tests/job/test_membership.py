"""Jobs one after the other in one process (`membership_script.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import forked
from tests.processes import ROOT, mpirun_command, mpirun_path, run

SCRIPT = str(ROOT / "tests" / "job" / "membership_script.py")


@pytest.mark.ranks
@pytest.mark.skipif(mpirun_path() is None, reason="no mpirun beside this Python")
def test_the_next_job_of_a_process_computes_the_same_and_a_closed_one_leaves_nothing(
    tmp_path: Path,
) -> None:
    command = mpirun_command(2, *forked.python(), SCRIPT, str(tmp_path), "mpi", "auto", "gloo")
    done = run(command, OMPI_MCA_mpi_yield_when_idle="1")
    assert done.returncode == 0, done.stdout[-4000:]
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["closed"] == {"threads": [], "group": False, "GLOO": False}
        assert result["sums"] == [[3.0] * 4] * 2
        one, two = result["fits"]
        assert (one["rank"], one["world_size"], one["generation"]) == (rank, 2, 0)
        assert two == one | {"generation": 1}  # the same bits
