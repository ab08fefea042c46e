"""How soon the other ranks know that one was killed, which held much memory: ``python benchmarks/death_notice.py``.

One rank of an elastic job fills ``--gigabytes`` and kills itself, ``--repeat`` times; the other one, which waits,
writes when the steward's word reaches it. Beside it stands how long the kernel took to end the connections of the dead.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from lightning_ring.launch.elastic import ElasticJob, ElasticLimits
from lightning_ring.membership.agreement import Report
from lightning_ring.membership.member import Member


def rank(folder: Path, gigabytes: float) -> None:
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
        memory[:: os.sysconf("SC_PAGESIZE")] = b"x" * len(range(0, len(memory), os.sysconf("SC_PAGESIZE")))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        rank(options.folder, options.gigabytes)
        return
    found = []
    for _ in range(options.repeat):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--folder", folder, "--gigabytes", str(options.gigabytes)]
            if ElasticJob(command, ElasticLimits(2)).run():
                sys.exit("the job failed")
            found.append([float(text) for text in (Path(folder) / "times").read_text().split()])
    for name, times in zip(("noticed", "connections ended"), zip(*found, strict=True), strict=True):
        shown = ", ".join(f"{each:.0f}" for each in times)
        print(f"{name} after {statistics.median(times):.0f} ms (median of {shown}), {options.gigabytes:g} GiB")


if __name__ == "__main__":
    main()
