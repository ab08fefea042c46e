"""How jobs of plain ``python train.py`` end: after two fits, after a death, with too few ranks,
by SIGTERM.
"""

import re

import pytest
import torch

from tests import forked
from tests.processes import ROOT, run

RANK = str(ROOT / "tests" / "integrations" / "lightning" / "elastic" / "ending_rank.py")
pytestmark = pytest.mark.ranks


def job(folder, *arguments, **env):
    done = run([*forked.python(), RANK, str(folder), *arguments], **forked.ranks(), **env)
    return done.returncode, done.stdout


def test_a_second_fit_of_a_script_goes_on_with_the_same_ranks(tmp_path):
    """And a death in it is counted."""
    code, output = job(tmp_path, "2", "1:5:9:step:1")
    assert code == 0, output
    names = r"process 0 \(pid \d+\), process 1 \(pid \d+\), process 2 \(pid \d+\)\n"
    assert re.search(f"generation 0: 3 ranks, after 0 steps: {names}", output)
    assert output.count("fit 0: 3 ranks, 8 steps, 0 deaths") == 3
    assert output.count("fit 1: 2 ranks, ") == 2
    assert output.count(" steps, 1 deaths") == 2


def test_a_step_that_is_finished_after_a_death_runs_its_hooks_no_second_time(tmp_path):
    code, output = job(tmp_path, "1", "1:3:9:hook")
    assert code == 0, output
    # the survivors held the averages, and a hook would find no communicator
    assert "2 ranks, after 4 steps" in output
    assert output.count("fit 0: 2 ranks, ") == 2


@pytest.mark.parametrize(
    ("event", "fits", "expected", "told"),
    [
        (
            "0:-:9:after",
            "1",
            137,
            r"0 \(pid \d+\) was killed by signal 9 .*, after the training had",
        ),
        (
            "1:-:9:after",
            "2",
            137,
            r"1 \(pid \d+\) was killed by signal 9 .*, after the training had",
        ),
        ("0:-:exit3:after", "1", 3, r"0 \(pid \d+\) ended with exit code 3"),
    ],
    ids=["before the export", "between two fits", "by an exit code"],
)
def test_a_death_after_the_fit_fails_the_job(event, fits, expected, told, tmp_path):
    code, output = job(tmp_path, fits, event)
    assert code == expected, output
    assert re.search(f"process {told}", output.splitlines()[-1]), output


def test_a_rank_that_dies_at_the_end_of_the_fit_is_followed_by_another_rank_0(tmp_path):
    code, output = job(tmp_path, "1", "0:8:9:train_end")
    assert code == 0, output
    assert sorted(re.findall(r"fit 0: 2 ranks.*rank (\d)", output)) == ["0", "1"]


def test_too_few_ranks_save_a_checkpoint_and_say_who_died(tmp_path):
    code, output = job(tmp_path, "1", "2:3:9", MIN="3")
    assert code == 1
    assert "process 2" in output.rpartition("Dead: ")[2]
    for number in (0, 1):
        assert f"process {number} ends: The job ends: it has 2 ranks left" in output
    saved = torch.load(tmp_path / "too-few-ranks-step=3.ckpt", weights_only=False)
    assert saved["global_step"] == 3
    assert saved["optimizer_states"][0]["state"]
    assert not list(tmp_path.glob("*.ckpt.*"))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    code, output = job(sharded, "1", "2:3:9", MIN="3", SHARD="1")
    assert code == 1
    assert "process 2" in output.rpartition("Dead: ")[2]
    parts_together = torch.load(sharded / "too-few-ranks-step=3.ckpt", weights_only=False)
    for name in ("optimizer_states", "state_dict", "global_step"):
        torch.testing.assert_close(parts_together[name], saved[name], msg=name)
    assert not list(sharded.glob("*.ckpt.*"))


def test_too_few_ranks_that_have_lost_a_shard_save_no_checkpoint(tmp_path):
    # a rank, and that with its mirror
    code, output = job(tmp_path, "1", "1:3:9", "2:3:9", MIN="3", SHARD="1")
    assert code == 1
    assert "No checkpoint could be saved" in output
    assert "process 0 ends: The job ends: it has 1 rank left" in output
    assert "saved a checkpoint" not in output
    assert not list(tmp_path.glob("*.ckpt*"))
