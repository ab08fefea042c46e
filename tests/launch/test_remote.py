"""Ranks on several hosts, each a network namespace: a host that is lost, an agent that is
killed.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.processes import is_dead
from tests.hosts import open_hosts, why_not
from tests.processes import ROOT, clean_env, end_session, wait_for

RANK = str(ROOT / "tests" / "elastic" / "counting_rank.py")
SUMMING = str(ROOT / "tests" / "elastic" / "summing_rank.py")
# in ssh's place: the host, and the command as "$*"
SSH = '#!/bin/sh\nhost=$1; shift\nexec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"\n'
# an agent on this very host, which has a second name
START = (
    "import sys; from lightning_ring.launch.elastic import *; from lightning_ring.launch.hosts "
    "import Host; sys.exit(ElasticJob([sys.executable, *sys.argv[1:]], ElasticLimits(4), "
    "hosts=[Host('localhost', 2), Host('elsewhere', 2)], line=lambda host, command: ['sh', '-c', "
    "command]).run())"
)


@contextmanager
def job(hosts, folder, script, *options):
    """Two ranks on each of ``hosts``; ringrun is on the first host."""
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    where = ",".join(f"{name}:2" for name in hosts.names)
    ringrun = [
        sys.executable,
        "-m",
        "lightning_ring.cli.ringrun",
        "-H",
        where,
        "--min-ranks",
        "2",
        *options,
    ]
    command = hosts.on(hosts.names[0], *ringrun, sys.executable, *script)
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            command,
            env=clean_env(RING_SSH=str(ssh)),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_session(process)
        process.wait(timeout=60)


def counting(folder, steps):
    """Counts ``steps`` steps of 20 ms."""
    return [RANK, str(folder), str(steps), "0.02"]


def said(folder):
    return (folder / "output").read_text()


def agents(hosts, host):
    found = []
    for pid in subprocess.run(
        ["ip", "netns", "pids", host], capture_output=True, text=True, timeout=60
    ).stdout.split():
        line = Path("/proc", pid, "cmdline").read_text()
        found += [int(pid)] if "lightning_ring.launch.agent" in line else []
    return found


@pytest.mark.netns
def test_the_ranks_of_a_lost_host_are_dead_and_the_others_go_on(tmp_path):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with (
        open_hosts(2, rate=None) as hosts,
        job(hosts, tmp_path, counting(tmp_path, 250)) as process,
    ):
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
def test_an_agent_that_is_killed_takes_its_ranks_along_and_is_started_again(tmp_path):
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with (
        open_hosts(2, rate=None) as hosts,
        job(hosts, tmp_path, counting(tmp_path, 400), "--respawn") as process,
    ):
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 4)
        (agent,) = agents(hosts, hosts.names[1])
        os.kill(agent, signal.SIGKILL)
        assert process.wait(timeout=240) == 0, said(tmp_path)
        assert not hosts.running(hosts.names[1])
    assert f"host {hosts.names[1]} is lost with 2 ranks: the connection to its agent ended" in said(
        tmp_path
    )
    assert "of them new" in said(tmp_path)
    numbers = {path.stem for path in tmp_path.glob("*.json")}
    assert numbers == {"0", "1", "4", "5"}, said(tmp_path)


@pytest.mark.netns
def test_collectives_across_hosts_go_on_when_a_rank_dies(tmp_path):
    """Nested in each host and across, then flat over the three that are left."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    script = [SUMMING, str(tmp_path), "auto", "20", "3:5:2"]
    with open_hosts(2, rate=None) as hosts, job(hosts, tmp_path, script) as process:
        assert process.wait(timeout=240) == 0, said(tmp_path)
    results = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("*.json")}
    assert set(results) == {"0", "1", "2"}
    for result in results.values():
        assert result["communicators"] == ["HierarchicalCommunicator", "GlooCommunicator"]
        assert result["default"] == [6.0, 3.0]


@pytest.mark.ranks
def test_a_host_that_cannot_be_reached_ends_the_start(tmp_path):
    command = [
        sys.executable,
        "-m",
        "lightning_ring.cli.ringrun",
        "-H",
        "localhost:1,elsewhere:1",
        "--min-ranks",
        "1",
    ]
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\necho 'ssh: connect to host elsewhere port 22: Connection refused' "
        ">&2; exit 255\n"
    )
    ssh.chmod(0o755)
    done = subprocess.run(
        [*command, sys.executable, RANK, str(tmp_path), "50"],
        env=clean_env(RING_SSH=str(ssh)),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 255, done.stderr
    assert "host elsewhere is lost with 1 rank: `" in done.stderr
    assert "ended with exit code 255" in done.stderr


@pytest.mark.ranks
@pytest.mark.skipif(
    not reachable_candidates({}), reason="this host has no address but its own loopback"
)
def test_told_to_stop_the_ranks_of_an_agent_end_too(tmp_path):
    """A rank of the agent is killed and leaves; then the job is told to stop."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, runpy, signal, sys\nopen({str(tmp_path)!r} + '/pid.' + "
        "os.environ['RING_MEMBER'], 'w').write(str(os.getpid()))\ndef stop(*_):\n    "
        f"open({str(tmp_path)!r} + '/stopped.' + os.environ['RING_MEMBER'], 'w'); os._exit(3)\n"
        "signal.signal(int(os.environ['RING_STOP_SIGNAL']), stop)\nsys.argv = ['', "
        f"{str(tmp_path)!r}, '100000', '0.02']; runpy.run_path({RANK!r}, run_name='__main__')\n"
    )
    with (tmp_path / "output").open("w") as output:
        command = [sys.executable, "-c", START, str(script)]
        process = subprocess.Popen(
            command,
            env=clean_env(),
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    try:
        wait_for(lambda: len(list(tmp_path.glob("*.log"))) == 4)
        pids = [int((tmp_path / f"pid.{number}").read_text()) for number in range(4)]
        os.kill(pids[2], signal.SIGKILL)
        wait_for(lambda: "process 2 (host elsewhere, pid" in said(tmp_path))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143, said(tmp_path)
    finally:
        end_session(process)
        process.wait(timeout=60)
    assert {path.suffix for path in tmp_path.glob("stopped.*")} == {".0", ".1", ".3"}
    assert all(is_dead(pid) for pid in pids)
    assert f"{pids[2]}) was killed by signal 9 (SIGKILL); 3 ranks left" in said(tmp_path)


@pytest.mark.ranks
@pytest.mark.skipif(
    not reachable_candidates({}), reason="this host has no address but its own loopback"
)
@contextmanager
def discovered(folder, script, *options):
    """A rank here, and others on the hosts that are written to ``folder``/listed later."""
    ringrun = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-np", "1"]
    ringrun += ["--host-discovery-script", f"cat {folder / 'listed'}", *options, sys.executable]
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [*ringrun, *script],
            env=clean_env(RING_SSH=str(folder / "ssh")),
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        end_session(process)
        process.wait(timeout=60)


def test_a_finished_job_does_not_wait_for_a_host_that_does_not_answer(tmp_path):
    ssh, listed = tmp_path / "ssh", tmp_path / "listed"
    ssh.write_text(f"#!/bin/sh\ntouch {tmp_path}/called; exec sleep 100\n")
    ssh.chmod(0o755)
    listed.write_text("localhost:1\n")
    with discovered(tmp_path, counting(tmp_path, 300)) as process:
        wait_for(lambda: "generation 0: 1 rank" in said(tmp_path))
        listed.write_text("localhost:1\nelsewhere:1\n")
        wait_for((tmp_path / "called").exists)
        assert not (tmp_path / "0.json").exists()
        wait_for((tmp_path / "0.json").exists)
        assert process.wait(timeout=12) == 0, said(tmp_path)
    assert "is lost" not in said(tmp_path)


def test_ranks_start_on_a_host_that_is_listed_later_and_not_on_one_that_is_listed_no_more(tmp_path):
    ssh, listed = tmp_path / "ssh", tmp_path / "listed"
    ssh.write_text('#!/bin/sh\nshift; exec sh -c "$*"\n')
    ssh.chmod(0o755)
    listed.write_text("localhost:1\n")
    with discovered(tmp_path, counting(tmp_path, 100000), "--max-np", "3", "--respawn") as process:
        wait_for(lambda: "generation 0: 1 rank" in said(tmp_path))
        listed.write_text("localhost:1\nelsewhere:5\n")
        wait_for(lambda: "3 ranks" in said(tmp_path) and len(list(tmp_path.glob("*.log"))) == 3)
        listed.write_text("localhost:1\n")
        time.sleep(2.5)  # it is asked every second
        agent = next(line for line in ps(process.pid) if "lightning_ring.launch.agent" in line)
        os.kill(int(agent.split()[0]), signal.SIGKILL)
        wait_for(lambda: "1 rank left" in said(tmp_path))
        # in generation 0, and again
        wait_for(lambda: said(tmp_path).count(": 1 rank, after") == 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 143, said(tmp_path)
    assert "host elsewhere is lost with 2 ranks" in said(tmp_path)
    assert "replaces it" not in said(tmp_path)


def ps(parent):
    """Pid and command of the children of ``parent``, and theirs."""
    lines = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, timeout=60
    ).stdout
    processes = [line.split(maxsplit=2) for line in lines.splitlines()[1:]]
    known, found = {str(parent)}, []
    while True:  # pids begin anew at a limit: a child may be listed before its parent
        new = [one for one in processes if one[1] in known and one[0] not in known]
        if not new:
            return found
        known |= {pid for pid, _, _ in new}
        found += [f"{pid} {command}" for pid, _, command in new]
