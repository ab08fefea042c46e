"""``ringrun --min-ranks`` in a batch job: an agent on the other node, one of whose ranks is
killed.
"""

import json
import re
import sys

import pytest

from tests.launch.counting import KILL, counting
from tests.slurm.test_slurm import JOB_SECONDS, Job

WRITES_PLACE = """
place = [os.environ[f'RING_{n}'] for n in ('NODE_RANK', 'LOCAL_RANK', 'LOCAL_SIZE', 'NUM_NODES')]
open(f'{folder}/place.{number}', 'w').write(' '.join(place))
"""
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(JOB_SECONDS + 50)]


def test_one_agent_a_node(cluster, tmp_path):
    script = counting(
        tmp_path, f"{WRITES_PLACE}if number == '3': when_counting({KILL})\ncount()", 150
    )
    command = f"ringrun --min-ranks 2 {sys.executable} {script}; echo code $?"
    output = Job(
        cluster, tmp_path, command, "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"
    ).ended()
    assert "code 0" in output, output
    places = [(tmp_path / f"place.{number}").read_text() for number in range(4)]
    assert places == ["0 0 2 2", "0 1 2 2", "1 0 2 2", "1 1 2 2"], output
    assert re.search(r"process 3 \(host 127\.0\.0\.2, pid \d+\) was killed", output)
    histories = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    assert [len(history) for history in histories] == [150] * 3
