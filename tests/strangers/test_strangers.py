"""All strangers at once, at every door of a job, before and while it trains: it ends right."""

import contextlib
import json
import sys

import pytest

from tests import forked
from tests.launch.counting import RANK
from tests.processes import RINGRUN, ROOT, started, wait_for
from tests.strangers.attack import listening

HERE = ROOT / "tests" / "strangers"
HOSTS = pytest.param("hosts", marks=pytest.mark.netns)
SECONDS = 120.0  # in which a job ends
STEPS = "150"
LIMIT_FILES = ["prlimit", "--nofile=1024"]  # that a process of a job may open


@pytest.mark.ranks
@pytest.mark.parametrize("job", ["plain", "horovod", "elastic", HOSTS])
def test_a_job_ends_right_whatever_strangers_do(job, request, tmp_path):
    address, on_job, on_strangers, env = "127.0.0.1", [], [], {}
    ranks, options = ["-n", "2"], {"plain": ["--no-mpi"], "horovod": []}
    if job in options:
        rank = [*forked.python(), str(HERE / "rank.py"), str(tmp_path), STEPS, job]
    else:
        rank = [sys.executable, RANK, str(tmp_path), STEPS, "0.02"]
    if job == "hosts":
        hosts = request.getfixturevalue("hosts")
        here, there = hosts.names
        ranks = ["-H", f"{here}:1,{there}:1"]
        address, env["RING_SSH"] = hosts.address(here), str(hosts.ssh)
        on_job, on_strangers = hosts.on(here), hosts.on(there)
    ring = [*RINGRUN, *ranks, *options.get(job, ["--min-ranks", "1"])]
    output = tmp_path / "output"
    attack = [*on_strangers, sys.executable, str(HERE / "attack.py"), address, str(tmp_path)]
    with contextlib.ExitStack() as cleanup:
        launcher = started([*on_job, *LIMIT_FILES, *ring, *rank], output, **env)
        launcher = cleanup.enter_context(launcher)
        (tmp_path / f"listens.{launcher.pid}").touch()
        for wave in ("before", "during"):
            cleanup.enter_context(started(attack, tmp_path / f"strangers {wave}"))
            wait_for(lambda: is_up(tmp_path) or launcher.poll() is not None, SECONDS)
            assert launcher.poll() is None, output.read_text()
        if job in ("plain", "elastic"):
            found = [listening(file.suffix[1:]) for file in tmp_path.glob("listens.*")]
            assert all(all(ports.values()) for ports in found), f"beyond loopback: {found}"
        assert launcher.wait(SECONDS) == 0, output.read_text()
    assert list(tmp_path.glob("attacked.*")), "no door was found"
    for number in range(2):
        steps = json.loads((tmp_path / f"{number}.json").read_text())
        assert len(steps) == int(STEPS), output.read_text()


def is_up(folder):
    return len([*folder.glob("up.*"), *folder.glob("*.log")]) >= 2
