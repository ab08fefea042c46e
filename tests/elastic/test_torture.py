"""Real processes without torch, killed at random moments: no finished step is lost, and there is
one history.
"""

import json
import sys

import pytest

from tests.processes import ROOT, run

RANK = str(ROOT / "tests" / "elastic" / "counting_rank.py")
TORTURE = str(ROOT / "tests" / "elastic" / "torture.py")
STEPS = 150
pytestmark = pytest.mark.ranks


def finished_steps(folder):
    """Every step that any process has finished, also a process that was killed then."""
    lines = [line for log in folder.glob("*.log") for line in log.read_text().splitlines()]
    return [tuple(json.loads(line)) for line in lines]


def check_histories(folder, steps):
    """All histories, of which there must be one or more, are equal, and hold every step that
    anybody has finished.
    """
    histories = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    assert histories
    assert all(history == histories[0] for history in histories)
    assert len(histories[0]) == steps
    for step, contributions in enumerate(histories[0]):
        assert contributions == [100 * step + rank for rank in range(len(contributions))]
    for step, contributions in finished_steps(folder):
        assert histories[0][step] == contributions
    return histories[0]


@pytest.mark.parametrize("seed", range(6))
def test_random_kills_lose_no_finished_step(seed, tmp_path):
    command = [
        sys.executable,
        TORTURE,
        str(seed),
        str(tmp_path),
        RANK,
        str(tmp_path),
        str(STEPS),
        "0.01",
    ]
    done = run(command)
    assert done.returncode == 0, done.stdout[-4000:]
    check_histories(tmp_path, STEPS)
    assert done.stdout.count("was killed by signal 9") >= 1, done.stdout[-4000:]
