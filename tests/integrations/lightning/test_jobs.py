"""Whole jobs through the Trainer: started in every way, failing in every way, and always ending."""

import re
import signal

import pytest

from tests import forked
from tests.processes import (
    RINGRUN,
    ROOT,
    assert_gone,
    mpirun_command,
    run,
    started,
    written_pids,
)

SCRIPT = str(ROOT / "tests" / "integrations" / "lightning" / "trainer_script.py")
WAYS = {
    "python": [*forked.python(), SCRIPT],
    "mpirun": mpirun_command(2, *forked.python(), SCRIPT),
    "torchrun": [*forked.python(), "-m", "torch.distributed.run", "--nproc-per-node=2", SCRIPT],
    "ringrun": [*RINGRUN, "-n", "2", SCRIPT],
}
pytestmark = pytest.mark.ranks


def job(way, action, folder):
    return started([*WAYS[way], action, str(folder)], **forked.ranks())


def ranks_in_step_3(process, folder):
    """The ranks' pids, once both are training."""
    return written_pids(process, [folder / f"step3.{rank}" for rank in range(2)])


@pytest.mark.parametrize(("way", "action"), [("python", "fork"), ("torchrun", "plain")])
def test_both_ranks_train_however_they_were_started(way, action, tmp_path):
    result = run([*WAYS[way], action, str(tmp_path)], **forked.ranks())
    assert result.returncode == 0, result.stdout
    # what spawning needs beside: `test_options.py`, `test_environment.py`
    forks = action == "fork"  # there the script goes on in the parent alone
    results = [(tmp_path / f"done.{rank}").read_text() for rank in range(1 if forks else 2)]
    assert results[0].startswith("2 ")
    assert len(set(results)) == 1
    assert (tmp_path / "step3.1").exists()


def output_of_failure(way, action, folder):
    with job(way, action, folder) as process:
        pids = ranks_in_step_3(process, folder)
        output, _ = process.communicate(timeout=90)
        assert process.returncode != 0
        assert_gone(pids)
    return output


# raising under torchrun, being killed under mpirun, mpirun's death: `tests/job/test_jobs.py`
def test_a_rank_that_raises_ends_the_job_and_its_error_is_shown(tmp_path):
    output = output_of_failure("python", "raise", tmp_path)
    assert "ValueError: no such photo" in output
    assert "rank 1" in output
    assert output.count("Traceback (most recent call last)") <= 1, output


def test_a_rank_that_raises_after_fit_ends_the_job(tmp_path):
    result = run([*WAYS["mpirun"], "raise-after", str(tmp_path)])
    assert result.returncode == 1, result.stdout
    assert "ValueError: no such photo" in result.stdout
    assert not list(tmp_path.glob("done.*"))


def test_a_rank_killed_is_named(tmp_path):
    output = output_of_failure("torchrun", "kill", tmp_path)
    assert "rank 1" in output or "rank      : 1" in output, output


def test_a_rank_that_stalls_is_shown_and_ends_the_job_after_the_timeout(tmp_path):
    output = output_of_failure("python", "sleep", tmp_path)
    assert "CollectiveError" in output
    assert "bucket 0 (layer." in output
    assert "waiting for rank 1" in output, output
    report = re.search(
        r"^all_reduce \"backward 4 \(step 3\): bucket 0 .* has waited [1-7] s; it fails after 8 "
        r"s\.\n((?:  .*\n)+)",
        output,
        re.M,
    )
    assert report, output
    for lines in (report[1], output[output.index("CollectiveError: ") :]):
        assert re.search(
            r"^  rank 1 \(host \S+, pid \d+\) is not in it, epoch 0, after optimizer step 3 ",
            lines,
            re.M,
        )
        assert re.search(
            r"^      \S*trainer_script\.py:\d+ _go_wrong: time\.sleep\(600\)$", lines, re.M
        ), lines
        assert "\n  rank 0 waits in it, epoch 0, after optimizer step 3 and backward 3.\n" in lines


@pytest.mark.parametrize(
    ("way", "signum"), [("python", signal.SIGTERM), ("ringrun", signal.SIGINT)]
)
def test_a_signal_stops_all_ranks_with_a_checkpoint(way, signum, tmp_path):
    with job(way, "slow", tmp_path) as process:
        pids = ranks_in_step_3(process, tmp_path)
        process.send_signal(signum)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 128 + signum, output
        assert "asking the ranks to stop" in output
        assert_gone(pids)
    assert (tmp_path / "stopped.ckpt").exists(), output
    assert not list(tmp_path.glob("done.*"))
