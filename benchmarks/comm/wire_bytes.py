"""Counts what passes the network interfaces of hosts (`benchmarks.hosts`), one rank on each."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hosts import INTERFACE, open_hosts, why_not
from lightning_ring.comm.communicator import Communicator

_ACKNOWLEDGED_SECONDS = 0.2


def passed() -> tuple[int, int]:
    """Bytes that this host has sent, and received, headers of TCP included."""
    folder = Path(f"/sys/class/net/{INTERFACE}/statistics")
    sent, received = (int((folder / name).read_text()) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def passed_by_all(comm: Communicator) -> tuple[int, int]:
    """`passed`, once all ranks are here, and acknowledgements too. Collective."""
    comm.barrier()
    time.sleep(_ACKNOWLEDGED_SECONDS)
    return passed()


def run_on_hosts(module: str, counts: Sequence[int], *words: str, heading: str = "") -> int:
    """``python -m module words`` in a rank on each of so many hosts, one count after another.
    Returns the exit code.
    """
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}", file=sys.stderr)
        return 77
    print(heading, end="\n" if heading else "", flush=True)
    for count in counts:
        with open_hosts(count, "10gbit") as hosts:
            done = subprocess.run(hosts.mpirun(count, sys.executable, "-m", module, *words))
        if done.returncode:
            return done.returncode
    return 0
