"""Several fits in one process: a process group that is open already is used, and a fit leaves
the process as it was.
"""

import contextlib
import json

import pytest

from lightning_ring.job.rendezvous.greeting import reserve_port
from tests import forked
from tests.processes import ROOT, mpirun_command, run, started

SCRIPT = str(ROOT / "tests" / "integrations" / "lightning" / "session_script.py")
pytestmark = pytest.mark.ranks

# They serve the next fit, and what the script does in between: the docstring of `job.job` says why.
STAYS = {"threads", "excepthook", "exit", "exit handlers", "rank", "group", "files"}


def results_of(folder, command):
    done = run(command, **forked.ranks())
    assert done.returncode == 0, done.stdout[-4000:]
    return results(folder)


def results(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def assert_all_sums_equal(found):
    first = found[0]["sums"][0]
    assert all(
        value == pytest.approx(first, rel=1e-6) for each in found for value in each["sums"]
    ), found


def test_ddp_first_in_ranks_that_lightning_started(tmp_path):
    phases = ["ddp", "ring", "ring_sharded"]
    found = results_of(tmp_path, [*forked.python(), SCRIPT, str(tmp_path), *phases])
    assert_all_sums_equal(found)
    assert len(found[0]["sums"]) == 3


def test_fit_leaves_the_process_as_it_was_and_its_group_to_ddp(tmp_path):
    phases = ["ring", "ring", "ddp", "ring"]
    command = mpirun_command(2, *forked.python(), SCRIPT, str(tmp_path), *phases)
    found = results_of(tmp_path, command)
    assert_all_sums_equal(found)
    for each in found:
        assert "GLOO_SOCKET_IFNAME" not in each["environment"]
        assert set(each["left"][0]) <= STAYS, each["left"][0]
        assert "ring-watch" in each["left"][0]["threads"][1]
        assert set(each["left"][1]) <= {"files"}, each["left"][1]
        assert each["open"] == []  # once the job is closed


def test_group_of_the_script_in_ranks_with_exported_variables(tmp_path):
    """The store that the script opened holds MASTER_PORT: there is none left to listen on."""
    command = [*forked.python(), SCRIPT, str(tmp_path), "init", "ring", "ddp"]
    with reserve_port() as reserved, contextlib.ExitStack() as cleanup:
        job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        job["MASTER_PORT"] = str(reserved.getsockname()[1])
        ranks = [
            cleanup.enter_context(started(command, RANK=rank, LOCAL_RANK=rank, **job))
            for rank in "01"
        ]
        outputs = [process.communicate(timeout=120)[0][-3000:] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(outputs)
    assert_all_sums_equal(results(tmp_path))
