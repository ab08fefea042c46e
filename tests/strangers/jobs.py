"""Real jobs of two ranks, and strangers at their doors, before and while they train."""

import contextlib
import json
import resource
import subprocess
import sys
import time

from tests import forked
from tests.hosts import open_hosts
from tests.processes import ROOT, clean_env, end_session
from tests.strangers.attack import listening

HERE = ROOT / "tests" / "strangers"
COUNTING = str(ROOT / "tests" / "elastic" / "counting_rank.py")
RINGRUN = [sys.executable, "-m", "lightning_ring.cli.ringrun"]
# in ssh's place: the host, and the command as "$*"
SSH = """#!/bin/sh
host=$1; shift
exec ip netns exec "$host" unshare --uts sh -c "hostname $host; $*"
"""
LIMIT = 120.0  # seconds, in which a job ends
JOBS = ("plain", "horovod", "elastic", "hosts")
FILES = 1024  # that a process of a job may open


def limit_files():
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


@contextlib.contextmanager
def started(command, output, **settings):
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, start_new_session=True, **settings
        )
    try:
        yield process
    finally:
        end_session(process)
        process.wait(60)


def run(job, folder, kinds=(), steps=150):
    """The seconds a step of ``job`` took, against strangers of ``kinds`` (none: all of them;
    ``None``: no strangers). The job ends right, or this fails.
    """
    with contextlib.ExitStack() as cleanup:
        address = "127.0.0.1"
        ring, script = [*RINGRUN, "-n", "2"], [COUNTING, str(folder), str(steps), "0.02"]
        python, on_job, on_strangers = [sys.executable], [], []
        environ = clean_env()
        if job in ("plain", "horovod"):
            script = [str(HERE / "rank.py"), str(folder), str(steps), job]
            ring += ["--no-mpi"] if job == "plain" else []
            python = forked.python()
        else:
            ring += ["--min-ranks", "1"]
        if job == "hosts":
            hosts = cleanup.enter_context(open_hosts(2, rate=None))
            ssh = folder / "ssh"
            ssh.write_text(SSH)
            ssh.chmod(0o755)
            environ["RING_SSH"] = str(ssh)
            address, (here, there) = hosts.address(hosts.names[0]), hosts.names
            ring = [*RINGRUN, "-H", f"{here}:1,{there}:1", "--min-ranks", "1"]
            on_job, on_strangers = hosts.on(here), hosts.on(there)
        launcher = cleanup.enter_context(
            started(
                [*on_job, *ring, *python, *script],
                folder / "output",
                env=environ,
                preexec_fn=limit_files,
            )
        )
        (folder / f"listens.{launcher.pid}").touch()
        attack = [*on_strangers, sys.executable, str(HERE / "attack.py"), address, str(folder)]
        attack += kinds or []
        for wave in ("before", "during"):
            if kinds is not None:
                cleanup.enter_context(started(attack, folder / f"strangers {wave}"))
            until = time.monotonic() + LIMIT
            while len([*folder.glob("up.*"), *folder.glob("*.log")]) < 2:
                assert launcher.poll() is None, (folder / "output").read_text()
                assert time.monotonic() < until, (folder / "output").read_text()
                time.sleep(0.01)
        if job in ("plain", "elastic"):
            found = [listening(file.suffix[1:]) for file in folder.glob("listens.*")]
            assert all(all(ports.values()) for ports in found), f"beyond loopback: {found}"
        code = launcher.wait(LIMIT)
    said = (folder / "output").read_text()
    assert code == 0, said
    assert kinds is None or list(folder.glob("attacked.*")), "no door was found"
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    if job in ("plain", "horovod"):
        return max(results)
    assert [len(result) for result in results] == [steps, steps], said
    return 0.0
