"""Real processes without torch, killed at random moments: no finished step is lost, and there is
one history.
"""

import json

import pytest

from tests.launch.counting import counting, start

STEPS = 150
# also before it connects, during a recovery, and two at once
KILLED = """
import random
draws = random.Random(f'%d {number}')
def die():
    time.sleep(draws.choice([0.0, 0.003, 0.03, 0.2, 0.4, 0.8]))
    os.kill(os.getpid(), signal.SIGKILL)
if number != '%d' and draws.random() < 0.7:
    if draws.random() < 0.8:
        when_counting(die)
    else:
        threading.Thread(target=die, daemon=True).start()
count()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("seed", range(3))
def test_random_kills_lose_no_finished_step(seed, tmp_path):
    """One process lives, and so its state. In two of three jobs the dead are replaced."""
    ranks, respawn = (4, "RespawnLimits(20, 0.02, 0.0)") if seed % 3 else (8, None)
    script = counting(tmp_path, KILLED % (seed, seed % ranks), STEPS)
    done = start(f"ElasticLimits({ranks}, respawn={respawn})", script)
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.count("was killed by signal 9") >= 2, done.stdout[-4000:]
    histories = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert histories
    assert all(history == histories[0] for history in histories)
    assert len(histories[0]) == STEPS
    for step, contributions in enumerate(histories[0]):
        assert contributions == [100 * step + rank for rank in range(len(contributions))]
    # every step that any process has finished, also a process that was killed then
    for log in tmp_path.glob("*.log"):
        for step, contributions in map(json.loads, log.read_text().splitlines()):
            assert histories[0][step] == contributions
