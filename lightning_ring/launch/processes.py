"""The processes that this one starts: how they begin, which ones their sessions hold, and how their end is noticed.

Each child leads a session of its own, so that a terminal's Ctrl-C reaches this process alone, which then asks the ranks
to stop; mpirun would kill them 0.2 s later, too soon for a checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_EXITING = 0x4  # PF_EXITING of linux/sched.h


@dataclass
class Child:
    """A process to start. ``name`` is for messages: ``"rank 1"``, ``"mpirun"``."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    pass_fds: Sequence[int] = ()
    dies_with_parent: int = signal.SIGKILL  # the signal that it gets if this process is killed
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)


def start_child(child: Child, cwd: str | None) -> subprocess.Popen[bytes]:
    # A terminal's input cannot be read from another session; a file or a pipe goes to rank 0 as always
    stdin = subprocess.DEVNULL if sys.stdin is None or sys.stdin.closed or os.isatty(0) else None
    with warnings.catch_warnings():
        # Python warns of forks from processes with threads; the child only calls prctl, whose symbol is loaded
        warnings.simplefilter("ignore", DeprecationWarning)
        return subprocess.Popen(
            list(child.command),
            env=dict(child.environ),
            cwd=cwd,
            stdin=stdin,
            pass_fds=child.pass_fds,
            start_new_session=True,
            preexec_fn=_bind_to_parent(child.dies_with_parent),
        )


def _bind_to_parent(signum: int) -> Callable[[], None] | None:
    """Let the kernel send the child ``signum`` when this process dies, however it dies (Linux)."""
    if not sys.platform.startswith("linux"):
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def bind() -> None:
        prctl(1, int(signum))  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)

    return bind


def processes_of_sessions(leaders: set[int]) -> list[int]:
    """Pids of the live processes in the sessions that ``leaders`` lead (Linux; elsewhere the live leaders' own)."""
    found: list[int] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        if int(fields[3]) in leaders and fields[0] not in "ZX":
            found.append(int(stat.parent.name))
    return found


def is_dead(pid: int) -> bool:
    """Whether ``pid`` runs no more of its program: every thread is on its way out of the kernel, or out of it.

    After ``kill -9`` a process first gives its memory back, then closes its sockets: 0.4 s later at 1 GB of memory, 2.1
    s at 8 GB. Its parent is told still later. The flag is set at once.
    """
    if not _is_exiting(Path(f"/proc/{pid}/stat")):
        return False
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return True
    return all(_is_exiting(thread / "stat") for thread in threads)


def _is_exiting(stat: Path) -> bool:
    """``stat`` as in proc(5): after the name in brackets come the state, and as the seventh field the flags."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return fields[0] in "ZX" or bool(int(fields[6]) & _EXITING)
