"""How soon the other ranks know that one was killed, which held much memory, or that the link to
its host was cut.

    python -m benchmarks.elastic.death_notice
    python -m benchmarks.elastic.death_notice --cut --repeat 10     # as root, for hosts

One rank of an elastic job fills ``--gigabytes`` and kills itself, ``--repeat`` times; the other
one, which waits, writes when the steward's word reaches it. Beside it stands how long the kernel
took to end the connections of the dead.

With ``--cut`` the two ranks are on two hosts (`benchmarks/hosts.py`) under ``ringrun``. The link of
the second host is taken down. Beside the time until the other rank knows stands how long the second
rank lived on, until its agent had killed it.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.hosts import open_hosts, why_not
from lightning_ring.launch.agent import ALIVE_SECONDS
from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.launch.processes import is_dead
from lightning_ring.membership.agreement import Report
from lightning_ring.membership.member import Member


def killed_rank(folder: Path, gigabytes: float) -> None:
    member = Member()
    member.open()
    noticed: list[float] = []
    member.on_stop = lambda error: noticed.append(time.monotonic())
    if member.number == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        (folder / "port").write_text(str(listener.getsockname()[1]))
    member.report(Report())
    member.next_view(60)
    if member.number == 1:
        connection = socket.create_connection(("127.0.0.1", int((folder / "port").read_text())))
        memory = bytearray(int(gigabytes * 2**30))
        memory[:: os.sysconf("SC_PAGESIZE")] = b"x" * len(
            range(0, len(memory), os.sysconf("SC_PAGESIZE"))
        )
        connection.sendall(str(time.monotonic()).encode())
        os.kill(os.getpid(), signal.SIGKILL)
    accepted, _ = listener.accept()
    killed = float(accepted.recv(64))
    closed: list[float] = []

    def wait_for_end() -> None:
        accepted.recv(1)
        closed.append(time.monotonic())

    waiting = threading.Thread(target=wait_for_end)
    waiting.start()
    waiting.join()
    (folder / "times").write_text(f"{1000 * (noticed[0] - killed)} {1000 * (closed[0] - killed)}")
    member.report(Report(0))
    member.next_view(60)
    member.finish()


def cut_rank(folder: Path) -> None:
    member = Member()
    member.open()
    noticed: list[float] = []
    over = threading.Event()

    def stop(error: Exception) -> None:
        noticed.append(time.monotonic())
        over.set()

    member.on_stop = stop
    member.report(Report())
    member.next_view(60)
    (folder / f"{member.number}.new").write_text(str(os.getpid()))
    (folder / f"{member.number}.new").rename(folder / f"{member.number}.pid")
    over.wait(60)  # only one of the two comes further
    (folder / "noticed").write_text(str(noticed[0]))
    member.report(Report(0))
    member.next_view(60)
    member.finish()


def kill(folder: Path, gigabytes: float) -> list[float]:
    """Milliseconds from the death until the other rank knows, and until its connection ends."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.elastic.death_notice",
        "--folder",
        str(folder),
        "--gigabytes",
        str(gigabytes),
    ]
    if ElasticJob(command, ElasticLimits(2)).run():
        sys.exit("the job failed")
    return [float(text) for text in (folder / "times").read_text().split()]


def cut(folder: Path) -> list[float]:
    """Milliseconds from the cut until the other rank knows, and until the rank behind the cut is
    dead.
    """
    with open_hosts(2, rate=None) as hosts:
        where = ",".join(f"{name}:1" for name in hosts.names)
        ringrun = [
            sys.executable,
            "-m",
            "lightning_ring.cli.ringrun",
            "-H",
            where,
            "--min-ranks",
            "1",
        ]
        command = [
            *ringrun,
            sys.executable,
            "-m",
            "benchmarks.elastic.death_notice",
            "--folder",
            str(folder),
            "--cut",
        ]
        environ = os.environ | {"RING_SSH": str(hosts.ssh)}
        job = subprocess.Popen(hosts.on(hosts.names[0], *command), env=environ)
        pids = [folder / f"{number}.pid" for number in range(2)]
        while not all(path.exists() for path in pids):
            if job.poll() is not None:
                sys.exit("the job failed")
            time.sleep(0.01)
        # somewhere between two of the agent's words
        time.sleep(1 + random.uniform(0, ALIVE_SECONDS))
        began = time.monotonic()
        hosts.cut(hosts.names[1])
        while not is_dead(int(pids[1].read_text())):
            time.sleep(0.001)
        died = time.monotonic()
        if job.wait(60):
            sys.exit("the job failed")
    return [1000 * (float((folder / "noticed").read_text()) - began), 1000 * (died - began)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--cut", action="store_true", help="cut the link to a host instead")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        cut_rank(options.folder) if options.cut else killed_rank(options.folder, options.gigabytes)
        return
    if options.cut and (reason := why_not()) is not None:
        sys.exit(f"no hosts: {reason}")
    found = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as name:
            found.append(cut(Path(name)) if options.cut else kill(Path(name), options.gigabytes))
    names = ("noticed", "dead behind the cut") if options.cut else ("noticed", "connections ended")
    planted = "a cut link" if options.cut else f"{options.gigabytes:g} GiB"
    for name, times in zip(names, zip(*found, strict=True), strict=True):
        shown = ", ".join(f"{each:.0f}" for each in times)
        print(f"{name} after {statistics.median(times):.0f} ms (median of {shown}), {planted}")


if __name__ == "__main__":
    main()
