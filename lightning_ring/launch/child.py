"""A process that this one starts.

Each child leads a session, so that a terminal's Ctrl-C reaches this process alone, which then asks
the ranks to stop; mpirun would kill them 0.2 s later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ring.job.exit import remove_segments
from lightning_ring.launch.processes import (
    failure_of,
    is_dead,
    processes_of_sessions,
    processor_seconds,
    session_of,
)


@dataclass(eq=False)
class Child:
    """A process to start. ``name`` is for messages: ``"rank 1"``, ``"mpirun"``.

    Attributes:
        program: The process that runs the program; another one than was started where
            ``command`` is a wrapper around it (`identify`).
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    dies_with_parent: int = signal.SIGKILL  # the signal that it gets if this process is killed
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    program: int = field(default=0, init=False)
    _session_is_over: bool = field(default=False, init=False)
    # processor time, and when that was new
    _used: tuple[float, float] = field(default=(-1.0, 0.0), init=False)

    def start(self, cwd: str | None = None, **variables: str) -> None:
        # A terminal cannot be read from another session.
        no_input = sys.stdin is None or sys.stdin.closed or os.isatty(0)
        with warnings.catch_warnings():
            # The child of this fork only calls prctl, whose symbol is loaded.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process = subprocess.Popen(
                self.command,
                env={**self.environ, **variables},
                cwd=cwd,
                stdin=subprocess.DEVNULL if no_input else None,
                start_new_session=True,
                preexec_fn=_bind_to_parent(self.dies_with_parent),
            )
        self.program = self.process.pid

    @property
    def pid(self) -> int:
        assert self.process is not None, "start() comes first"
        return self.process.pid

    @property
    def is_started(self) -> bool:
        return self.process is not None

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def poll(self) -> int | None:
        """The exit code, -n for signal n; `None` before the start and until the end."""
        return None if self.process is None else self.process.poll()

    def identify(self, pid: int) -> None:
        """The program says that it is process ``pid``, perhaps below a wrapper."""
        # else a number of another container
        if session_of(pid) == self.pid:
            self.program = pid

    def is_dead(self) -> bool:
        """Whether the program is dead (`processes.is_dead`); a wrapper may still run."""
        return self.program > 0 and is_dead(self.program)

    def failure(self) -> int | None:
        """The exit code of a dead program; `None` as long as it is not known, or 0."""
        return failure_of(self.program)

    def idle(self, now: float) -> float:
        """Seconds without processor time of the program, as exact as the calls are frequent."""
        used = processor_seconds(self.program)
        if used != self._used[0]:
            self._used = (used, now)
        return now - self._used[1]

    def send_signal(self, signum: int) -> None:
        """To the program, not to a wrapper around it, as long as the program runs."""
        if self.is_running:
            pid = self.program if session_of(self.program) == self.pid else self.pid
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def session(self) -> list[int]:
        """Live processes in this child's session. Its number may be reused when there are none."""
        if self.process is None or self._session_is_over:
            return []
        found = processes_of_sessions({self.process.pid})
        self._session_is_over = not found and self.process.poll() is not None
        return found

    def kill_session(self) -> None:
        for pid in sorted(self.session(), key=lambda pid: pid != self.program):
            remove_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


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
