"""Starts the processes of a job, passes signals on, waits for them, and cleans up.

Each child leads a session of its own, so that a terminal's Ctrl-C reaches this process alone, which then asks the ranks
to stop; mpirun would kill them 0.2 s later, too soon for a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lightning_ring.job.exit import remove_segments, say

STOP_SIGNAL = signal.SIGUSR2  # mpirun passes it on to the ranks
PEERS_SECONDS = 15.0  # in which the other ranks end by themselves after one died
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Child:
    """A process to start. ``name`` is for messages: ``"rank 1"``, ``"mpirun"``."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    pass_fds: Sequence[int] = ()
    dies_with_parent: int = signal.SIGKILL  # the signal that it gets if this process is killed
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)


def stop_grace(environ: Mapping[str, str]) -> float:
    """Seconds between asking the ranks to stop and ending them: RING_STOP_GRACE, or 30."""
    try:
        return max(0.0, float(environ.get("RING_STOP_GRACE", "30")))
    except ValueError:
        return 30.0


class Supervisor:
    """Runs ``children`` as one job: when one fails the others end, and when this process is told to stop, all do."""

    def __init__(self, children: Sequence[Child], *, grace: float, stop_signal: int = STOP_SIGNAL) -> None:
        self._children = children
        self._grace = grace
        self._stop_signal = stop_signal
        self._signals: list[int] = []
        self._handled = 0
        self._exit_code: int | None = None
        self._plan: list[tuple[float, Callable[[], None]]] = []  # time and action, earliest first

    def run(self, cwd: str | None = None) -> int:
        """Start the children, wait for all, and return the job's exit code.

        That is 0, the code of the first child that failed (128 + n if signal n ended it), or 128 + n if signal n told
        this process to stop.
        """
        with self._catching_signals(), tempfile.NamedTemporaryFile("r", prefix="lightning_ring_") as cause:
            try:
                for child in self._children:
                    child.environ = {**child.environ, "RING_ERROR_FILE": cause.name}
                    child.process = _start(child, cwd)
                    for fd in child.pass_fds:  # the child's alone from here on: closed when it dies
                        os.close(fd)
                while self._running():
                    self._step()
                    time.sleep(0.05)
                self._step()
            finally:
                if self._running() or self._exit_code or self._signals:
                    self._clear()
            if self._exit_code and not self._signals and (line := cause.read()):
                say(line)  # last, below what mpirun prints about any rank that did not end with 0
        if self._signals:
            return 128 + self._signals[0]
        return self._exit_code or 0

    def kill(self, signum: int) -> None:
        for child in self._running():
            assert child.process is not None
            child.process.send_signal(signum)

    def _running(self) -> list[Child]:
        return [child for child in self._children if child.process is not None and child.process.poll() is None]

    def _step(self) -> None:
        if self._exit_code is None and (failed := self._failed()) is not None:
            child, code = failed
            self._exit_code = code if code > 0 else 128 - code
            self._on_failure(child, code)
        while self._handled < len(self._signals):
            self._on_signal(self._signals[self._handled], times=self._handled)
            self._handled += 1
        while self._plan and self._plan[0][0] <= time.monotonic():
            self._plan.pop(0)[1]()

    def _failed(self) -> tuple[Child, int] | None:
        """A child that failed, and its code (-n for signal n). Of several, one that a signal ended: that one did not
        end because of another."""
        codes = [(child, child.process.poll() or 0) for child in self._children if child.process is not None]
        return min((pair for pair in codes if pair[1] != 0), key=lambda pair: pair[1] > 0, default=None)

    def _on_failure(self, child: Child, code: int) -> None:
        assert child.process is not None
        how = f"was killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with exit code {code}"
        if len(self._children) > 1 or code < 0:  # mpirun has named the rank itself
            say(f"{child.name} (pid {child.process.pid}) {how}; the job ends")
        if not self._signals:
            self._end_in(PEERS_SECONDS)

    def _on_signal(self, signum: int, times: int) -> None:
        if times == 0:
            say(f"{_signal_name(signum)}: asking the ranks to stop, for up to {self._grace:.0f} s; again ends them now")
            self.kill(self._stop_signal)
            self._end_in(self._grace)
        elif times == 1:
            self._end_in(0)
        else:
            self._kill_sessions()

    def _end_in(self, seconds: float) -> None:
        now = time.monotonic()
        self._plan = [
            (now + seconds, lambda: self.kill(signal.SIGTERM)),
            (now + seconds + _TERM_SECONDS, self._kill_sessions),
        ]

    def _clear(self) -> None:
        """After a failure: wait until the processes of the children end by themselves (a rank sees that mpirun has
        gone), then kill them, and remove the folder of a killed mpirun."""
        deadline = time.monotonic() + (_TERM_SECONDS if not self._running() else 0)
        while self._sessions() and time.monotonic() < deadline:
            time.sleep(0.1)
        self._kill_sessions()
        for child in self._running():
            assert child.process is not None
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=_TERM_SECONDS)
        for child in self._children:
            if child.name == "mpirun" and child.process is not None:
                shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{child.process.pid}", ignore_errors=True)

    def _sessions(self) -> list[int]:
        """Processes that still live in the children's sessions."""
        leaders = {child.process.pid for child in self._children if child.process is not None}
        return processes_of_sessions(leaders)

    def _kill_sessions(self) -> None:
        for pid in self._sessions():
            remove_segments(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets only the main thread handle signals
            return
        previous = {signum: signal.getsignal(signum) for signum in _STOPPING}
        for signum in _STOPPING:
            if previous[signum] is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, self._note)
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._signals.append(signum)


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


def _start(child: Child, cwd: str | None) -> subprocess.Popen[bytes]:
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


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
