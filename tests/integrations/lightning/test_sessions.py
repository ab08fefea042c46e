"""Several fits in one process: a process group that is open already is used, and a fit leaves
the process as it was.
"""

import json
import subprocess

import pytest

from lightning_ring.job.rendezvous.greeting import reserve_port
from tests import forked
from tests.processes import ROOT, clean_env, end_session, mpirun_command, run

SCRIPT = str(ROOT / "tests" / "integrations" / "lightning" / "session_script.py")
pytestmark = pytest.mark.ranks

# They serve the next fit, and what the script does in between: the docstring of `job.job` says why.
STAYS = {"threads", "excepthook", "exit", "exit handlers", "rank", "group", "files"}


def results(folder, command):
    done = run(command, **forked.ranks())
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def assert_all_sums_equal(found):
    first = found[0]["sums"][0]
    assert all(
        value == pytest.approx(first, rel=1e-6) for each in found for value in each["sums"]
    ), found


def test_ddp_first_in_ranks_that_lightning_started(tmp_path):
    found = results(
        tmp_path, [*forked.python(), SCRIPT, str(tmp_path), "ddp", "ring", "ring_sharded"]
    )
    assert_all_sums_equal(found)
    assert len(found[0]["sums"]) == 3


def test_fit_leaves_the_process_as_it_was_and_its_group_to_ddp(tmp_path):
    phases = ["ring", "ring", "ddp", "ring"]
    found = results(tmp_path, mpirun_command(2, *forked.python(), SCRIPT, str(tmp_path), *phases))
    assert_all_sums_equal(found)
    for each in found:
        assert "GLOO_SOCKET_IFNAME" not in each["environment"]
        assert set(each["left"][0]) <= STAYS, each["left"][0]
        assert "ring-watch" in each["left"][0]["threads"][1]
        assert set(each["left"][1]) <= {"files"}, each["left"][1]
        assert each["open"] == []  # once the job is closed


def test_group_of_the_script_in_ranks_with_exported_variables(tmp_path):
    """The store that the script opened holds MASTER_PORT: there is none left to listen on."""
    reserved = reserve_port()
    ranks = [
        subprocess.Popen(
            [*forked.python(), SCRIPT, str(tmp_path), "init", "ring", "ddp"],
            env=clean_env(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE="2",
                LOCAL_WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(reserved.getsockname()[1]),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            end_session(process)
        reserved.close()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(
        output[-3000:] for output in outputs
    )
    assert_all_sums_equal(
        [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    )
