"""The end of a rank that must not wait for the others, and the watch over its launcher."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

OPEN_MPI_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted", "orted")
MPI_LAUNCHERS = (*OPEN_MPI_LAUNCHERS, "hydra_pmi_proxy", "slurmstepd")
CAUSE_BYTES = 4096
# Shared-memory files of Open MPI, MPICH and Intel MPI begin so.
_SEGMENTS = ("sm_segment.", "vader_segment.", "osc_sm", "osc_rdma", "mpich_shm_", "Intel_MPI_")


def say(line: str) -> None:
    """Print one line to standard error; a closed pipe is no error."""
    with contextlib.suppress(OSError, ValueError):
        print(f"lightning_ring: {line}", file=sys.stderr, flush=True)


def leave_cause(line: str) -> None:
    """Hand ``line`` to the process that started the ranks, which prints it last. The first rank's
    counts.

    It listens at the abstract socket ``RING_CAUSE`` of its host (Linux), which leaves no file.
    """
    if name := os.environ.get("RING_CAUSE"):
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.setblocking(False)
            sender.sendto(line.encode()[:CAUSE_BYTES], f"\0{name}")


def in_one_line(error: BaseException) -> str:
    """``error`` in a message, with the error whose handling raised it. A data-loader worker's error
    names its cause last.
    """
    lines = str(error).strip().splitlines() or [""]
    text = lines[0]
    if " in DataLoader worker process " in text:
        text += f" {lines[-1]}"
    if "allocate shared memory(shm)" in text or "workers are out of shared memory" in text:
        text += (
            ". Data-loader workers need a larger /dev/shm (`lightning-ring doctor --only memory` "
            "says how); num_workers=0 does without."
        )
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    first = None if error.__suppress_context__ else error.__context__
    return f"{line} (after {in_one_line(first)})" if first is not None else line


def end_process(code: int) -> NoReturn:
    """End this process and the MPI job now, without exit handlers: MPI_Finalize would wait for the
    others.

    The launcher and the job watch see ``code`` and end the rest. MPI_Abort can block on a cut link.
    """
    # A thread in C ends the process if flushing blocks on a pipe that nobody reads.
    faulthandler.dump_traceback_later(3, exit=True, file=os.open(os.devnull, os.O_WRONLY))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class LauncherProbe:
    """Whether this process's parent still lives, and its launcher, which may be an older ancestor.

    Open MPI leaves the ranks running after ``kill -9`` of mpirun. A shell between them survives
    too, so the launcher is remembered with its start time.
    """

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._launcher = _launcher_above(self._parent)
        # it may have gone before this rank was ready to watch it
        self._orphaned = self._parent == 1 and os.environ.get("RING_LAUNCHER_PID", "1") != "1"

    def end_soon(self) -> None:
        """End this host's Open MPI launcher, which waits for ever for a lost host, in a few
        seconds.

        mpirun gives up at the third SIGTERM, with exit code 1 and its files removed.
        """
        if self._launcher is not None and self._launcher[2] in OPEN_MPI_LAUNCHERS:
            script = (
                "exec </dev/null >/dev/null 2>&1; sleep 2; for i in 1 2 3; do kill -TERM "
                f"{self._launcher[0]} || exit; sleep 1; done"
            )
            subprocess.Popen(script, shell=True, start_new_session=True)

    def gone(self) -> str | None:
        """A sentence about the process that has gone, or ``None`` while all live."""
        if self._orphaned or os.getppid() != self._parent:
            return f"its parent process {self._parent} has gone"
        if self._launcher is not None:
            pid, started, name = self._launcher
            fields = _stat(pid)
            if fields is None or fields[2] != started:
                return f"{name} (pid {pid}), which started it, has gone"
        return None


def _launcher_above(pid: int) -> tuple[int, str, str] | None:
    """Number, start time and name; `None` without a known launcher."""
    own_launcher = os.environ.get("RING_LAUNCHER_PID")
    while pid > 1 and (fields := _stat(pid)) is not None:
        name, parent, started = fields
        if name in MPI_LAUNCHERS or str(pid) == own_launcher:
            return pid, started, name
        pid = parent
    return None


def _stat(pid: int) -> tuple[str, int, str] | None:
    """Name, parent and start time of a process (Linux)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    before, _, after = text.rpartition(")")
    fields = after.split()
    return (before.partition("(")[2], int(fields[1]), fields[19]) if fields[0] != "Z" else None


def remove_files_of_mpirun() -> None:
    """Remove this rank's shared memory and the job's folder after mpirun was killed."""
    remove_segments()
    folder = Path(os.environ.get("PMIX_SERVER_TMPDIR", ""))
    if folder.name.startswith("ompi."):
        shutil.rmtree(folder, ignore_errors=True)


def remove_segments(pid: int | str = "self") -> None:
    """Remove the shared-memory files of MPI that process ``pid`` maps."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            _, _, path = line.partition("/dev/shm/")
            if Path(path).name.startswith(_SEGMENTS):
                Path("/dev/shm", path).unlink(missing_ok=True)
