"""``ringrun --min-ranks`` in a batch job: an agent on the other node, one of whose ranks is
killed.
"""

import json
import sys

import pytest

from tests.processes import ROOT
from tests.slurm.test_slurm import JOB_SECONDS, Job

RANK = ROOT / "tests" / "elastic" / "counting_rank.py"
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(JOB_SECONDS + 50)]


def test_one_agent_a_node(cluster, tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, runpy, signal, sys, threading, time\ndef kill():\n    while not "
        f"os.path.exists({str(tmp_path / '3.log')!r}): time.sleep(0.01)\n    os.kill(os.getpid(), "
        "signal.SIGKILL)\nplace = [os.environ['RING_' + name] for name in ('NODE_RANK', "
        f"'LOCAL_RANK', 'LOCAL_SIZE', 'NUM_NODES')]\nopen({str(tmp_path)!r} + '/place.' + "
        "os.environ['RING_MEMBER'], 'w').write(' '.join(place))\nif os.environ['RING_MEMBER'] == "
        "'3': threading.Thread(target=kill, daemon=True).start()\nsys.argv = ['', "
        f"{str(tmp_path)!r}, '150', '0.02']; runpy.run_path({str(RANK)!r}, run_name='__main__')\n"
    )
    command = f"ringrun --min-ranks 2 {sys.executable} {script}; echo code $?"
    output = Job(
        cluster, tmp_path, command, "--nodes=2", "--ntasks=4", "--ntasks-per-node=2"
    ).ended()
    assert "code 0" in output, output
    places = [(tmp_path / f"place.{number}").read_text() for number in range(4)]
    assert places == ["0 0 2 2", "0 1 2 2", "1 0 2 2", "1 1 2 2"], output
    assert "process 3 (host 127.0.0.2, pid" in output
    histories = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(3)]
    assert [len(history) for history in histories] == [150] * 3
