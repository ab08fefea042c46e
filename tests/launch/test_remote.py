"""Ranks on several hosts, each a network namespace: a host that is lost, an agent that is
killed.
"""

import json
import os
import re
import signal
import sys
import time

import pytest

from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.processes import is_dead
from tests import forked
from tests.launch.counting import JOB, RANK, counting
from tests.processes import (
    AGENT,
    ON_THIS_HOST,
    RINGRUN,
    ROOT,
    executable,
    run,
    started,
    wait_for,
)

SUMMING = str(ROOT / "tests" / "elastic" / "summing_rank.py")


pytestmark = pytest.mark.ranks
needs_address = pytest.mark.skipif(
    not reachable_candidates({}), reason="this host has no address but its own loopback"
)


def job(hosts, folder, script, *options):
    """Two ranks on each of ``hosts``; ringrun is on the first host."""
    where = ",".join(f"{name}:2" for name in hosts.names)
    ringrun = [*RINGRUN, "-H", where, "--min-ranks", "2", *options]
    command = hosts.on(hosts.names[0], *ringrun, *script)
    return started(command, folder / "output", RING_SSH=str(hosts.ssh))


def count(folder, steps):
    """Counts ``steps`` steps of 20 ms."""
    return [sys.executable, RANK, str(folder), str(steps), "0.02"]


def said(folder):
    return (folder / "output").read_text()


@pytest.mark.netns
def test_the_ranks_of_a_lost_host_are_dead_and_the_others_go_on(hosts, tmp_path):
    with job(hosts, tmp_path, count(tmp_path, 250)) as process:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 4)
        hosts.cut(hosts.names[1])
        wait_for(lambda: "generation 1: 2 ranks" in said(tmp_path))
        wait_for(lambda: not hosts.running(hosts.names[1]))
        assert process.wait(timeout=240) == 0, said(tmp_path)
    lost = rf"host {hosts.names[1]} is lost with 2 ranks: its agent has said nothing for \d+\.\d s"
    assert re.search(lost, said(tmp_path)), said(tmp_path)
    histories = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert [len(history) for history in histories] == [250, 250]


@pytest.mark.netns
def test_an_agent_that_is_killed_takes_its_ranks_along_and_is_started_again(hosts, tmp_path):
    with job(hosts, tmp_path, count(tmp_path, 400), "--respawn") as process:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 4)
        kill_agent(process)
        assert process.wait(timeout=240) == 0, said(tmp_path)
        assert not hosts.running(hosts.names[1])
    assert f"host {hosts.names[1]} is lost with 2 ranks: the connection to its agent ended" in said(
        tmp_path
    )
    assert "of them new" in said(tmp_path)
    numbers = {path.stem for path in tmp_path.glob("*.json")}
    assert numbers == {"0", "1", "4", "5"}, said(tmp_path)


@pytest.mark.netns
def test_collectives_across_hosts_go_on_when_a_rank_dies(hosts, tmp_path):
    """Nested in each host and across, then flat over the three that are left."""
    script = [*forked.python(), SUMMING, str(tmp_path), "auto", "20", "3:5:2"]
    with job(hosts, tmp_path, script) as process:
        assert process.wait(timeout=240) == 0, said(tmp_path)
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(results) == {"0", "1", "2"}
    for result in results.values():
        assert result["communicators"] == ["HierarchicalCommunicator", "GlooCommunicator"]
        assert result["default"] == [6.0, 3.0]


def test_a_host_that_cannot_be_reached_ends_the_start(tmp_path):
    ssh = executable(
        tmp_path / "ssh", "echo 'ssh: connect to host elsewhere: refused' >&2; exit 255"
    )
    command = [*RINGRUN, "-H", "localhost:1,elsewhere:1", "--min-ranks", "1"]
    done = run([*command, *count(tmp_path, 50)], RING_SSH=ssh)
    assert done.returncode == 255, done.stdout
    assert "host elsewhere is lost with 1 rank: `" in done.stdout
    assert "ended with exit code 255" in done.stdout


STOPS = """
open(f'{folder}/pid.{number}', 'w').write(str(os.getpid()))
def stop(*_):
    open(f'{folder}/stopped.{number}', 'w')
    os._exit(3)
signal.signal(int(os.environ['RING_STOP_SIGNAL']), stop)
count()
"""


@needs_address
def test_told_to_stop_the_ranks_of_an_agent_end_too(tmp_path):
    """A rank of the agent is killed and leaves; then the job is told to stop."""
    script = counting(tmp_path, STOPS)
    command = [*JOB, f"ElasticLimits(3){AGENT % (1, 2)}", sys.executable, script]
    with started(command, tmp_path / "output") as process:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 3)
        pids = [int((tmp_path / f"pid.{number}").read_text()) for number in range(3)]
        os.kill(pids[2], signal.SIGKILL)
        wait_for(lambda: "2 ranks left" in said(tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143, said(tmp_path)
    assert {path.suffix for path in tmp_path.glob("stopped.*")} == {".0", ".1"}
    assert all(is_dead(pid) for pid in pids)
    assert f"{pids[2]}) was killed by signal 9 (SIGKILL); 2 ranks left" in said(tmp_path)


def discovered(folder, ssh, steps, *options):
    """A rank here, and others on the hosts that are written to ``folder``/listed later."""
    (folder / "listed").write_text("localhost:1\n")
    ringrun = [*RINGRUN, "-np", "1", "--host-discovery-script", f"cat {folder / 'listed'}"]
    command = [*ringrun, *options, *count(folder, steps)]
    return started(command, folder / "output", RING_SSH=executable(folder / "ssh", ssh))


@needs_address
def test_a_finished_job_does_not_wait_for_a_host_that_does_not_answer(tmp_path):
    listed = tmp_path / "listed"
    with discovered(tmp_path, f"touch {tmp_path}/called; exec sleep 100", 300) as process:
        wait_for(lambda: "generation 0: 1 rank," in said(tmp_path))
        listed.write_text("localhost:1\nelsewhere:1\n")
        wait_for((tmp_path / "called").exists)
        assert not (tmp_path / "0.json").exists()
        wait_for((tmp_path / "0.json").exists)
        assert process.wait(timeout=12) == 0, said(tmp_path)
    assert "is lost" not in said(tmp_path)


@needs_address
def test_ranks_start_on_a_host_that_is_listed_later_and_not_on_one_that_is_listed_no_more(tmp_path):
    listed = tmp_path / "listed"
    with discovered(tmp_path, ON_THIS_HOST, 100000, "--max-np", "3", "--respawn") as process:
        wait_for(lambda: "generation 0: 1 rank," in said(tmp_path))
        listed.write_text("localhost:1\nelsewhere:5\n")
        wait_for(lambda: "3 ranks" in said(tmp_path) and len(list(tmp_path.glob("*.log"))) == 3)
        listed.write_text("localhost:1\n")
        time.sleep(2.5)  # it is asked every second
        kill_agent(process)
        wait_for(lambda: "1 rank left" in said(tmp_path))
        # in generation 0, and again
        wait_for(lambda: said(tmp_path).count(": 1 rank, after") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 143, said(tmp_path)
    assert "host elsewhere is lost with 2 ranks" in said(tmp_path)
    assert "replaces it" not in said(tmp_path)


def kill_agent(job):
    """The one that ``job`` has started."""
    pids = run(["pgrep", "-P", str(job.pid), "-f", "lightning_ring.launch.agent"]).stdout
    os.kill(int(pids), signal.SIGKILL)
