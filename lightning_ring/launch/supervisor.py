"""Starts the processes of a job, passes signals on, waits for them, and cleans up."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, TypeAlias

from lightning_ring.job.exit import CAUSE_BYTES, say
from lightning_ring.launch.child import Child

if TYPE_CHECKING:
    from lightning_ring.launch.remote import RemoteChild

    Supervised: TypeAlias = Child | RemoteChild

STOP_SIGNAL = signal.SIGUSR2  # mpirun passes it on to the ranks
PEERS_SECONDS = 15.0  # in which the other ranks end by themselves after one died
_TERM_SECONDS = 5.0  # between SIGTERM and SIGKILL
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop_grace(environ: Mapping[str, str]) -> float:
    """Seconds between asking the ranks to stop and ending them: RING_STOP_GRACE, or 30."""
    try:
        return max(0.0, float(environ.get("RING_STOP_GRACE", "30")))
    except ValueError:
        return 30.0


class Supervisor:
    """Runs ``children`` as one job: when one fails the others end, and when this process is told to
    stop, all do.

    ``excuses(child, code)`` tells whether the job goes on although a child ended with ``code`` (-n
    for signal n), which is not 0. ``wait`` is called between two looks at the children, and may
    `start` more of them: `run` ends when no child runs. What it ``holds`` stays open meanwhile.
    """

    def __init__(
        self,
        children: Sequence[Supervised],
        *,
        grace: float,
        stop_signal: int = STOP_SIGNAL,
        excuses: Callable[[Any, int], bool] = lambda child, code: False,
        wait: Callable[[], None] = lambda: time.sleep(0.05),
        holds: object = None,
    ) -> None:
        self._children = list(children)
        self._grace = grace
        self._stop_signal = stop_signal
        self._excuses = excuses
        self._wait = wait
        self._holds = holds
        self.cause = ""  # of the failure, as a child wrote it
        self._cause_name = f"lightning_ring_{token_hex(16)}"
        self._signals: list[int] = []
        self._handled = 0
        self._exit_code: int | None = None
        self._plan: list[tuple[float, Callable[[], None]]] = []  # time and action, earliest first

    def run(self) -> int:
        """Start the children, wait for all, and return the job's exit code.

        That is 0, the code of the first child that failed (128 + n if signal n ended it), or 128 +
        n if signal n told this process to stop.
        """
        with self._catching_signals(), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as causes:
            if sys.platform.startswith("linux"):  # where sockets have names that are no files
                causes.bind(f"\0{self._cause_name}")
            causes.setblocking(False)
            try:
                for child in self._children:
                    child.start(RING_CAUSE=self._cause_name)
                while self._running():
                    self._step()
                    self._wait()
                self._step()
            finally:
                if self._running() or self._exit_code or self._signals:
                    self._clear()
            with contextlib.suppress(BlockingIOError):
                self.cause = causes.recv(CAUSE_BYTES).decode(errors="replace")
            if self._exit_code and not self._signals and self.cause:
                # last, below what mpirun prints about any rank that did not end with 0
                say(self.cause)
        if self._signals:
            return 128 + self._signals[0]
        return self._exit_code or 0

    def start(self, child: Supervised) -> None:
        """Start one more child of the job that runs."""
        self._children.append(child)
        child.start(RING_CAUSE=self._cause_name)

    @property
    def ending(self) -> bool:
        """Whether the job was told to stop, or a child failed."""
        return bool(self._signals) or self._exit_code is not None

    def kill(self, signum: int) -> None:
        for child in self._running():
            child.send_signal(signum)

    def fail(self, seconds: float, code: int = 1) -> None:
        """The job has failed with ``code``, without that a child has ended so: all of them end
        within ``seconds``, by themselves or not."""
        if self._exit_code is None:
            self._exit_code = code
            self._end_in(seconds)

    def _running(self) -> list[Supervised]:
        return [child for child in self._children if child.is_running]

    def _step(self) -> None:
        if self._exit_code is None:
            self._look_for_failure()
        while self._handled < len(self._signals):
            self._on_signal(self._signals[self._handled], times=self._handled)
            self._handled += 1
        while self._plan and self._plan[0][0] <= time.monotonic():
            self._plan.pop(0)[1]()

    def _look_for_failure(self) -> None:
        codes = [(child, child.poll() or 0) for child in self._children]
        failed = [pair for pair in codes if pair[1] and not self._excuses(*pair)]
        if not failed:
            return
        # of several, one that a signal ended: that one did not end because of another
        child, code = min(failed, key=lambda pair: pair[1] > 0)
        self._exit_code = exit_code(code)
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by signal {-code} ({signal_name(-code)})"
        if len(self._children) > 1 or code < 0:  # mpirun has named the rank itself
            say(f"{child.name} (pid {child.pid}) {how}; the job ends")
        if not self._signals:
            self._end_in(PEERS_SECONDS)

    def _on_signal(self, signum: int, times: int) -> None:
        if times == 0:
            say(
                f"{signal_name(signum)}: asking the ranks to stop, for up to {self._grace:.0f} s; "
                "again ends them now"
            )
            self.kill(self._stop_signal)
            self._end_in(self._grace)
        elif times == 1:
            self._end_in(0)
        else:
            self._kill_sessions()

    def _end_in(self, seconds: float) -> None:
        """Leave the children ``seconds`` to end by themselves. A stopped one (SIGSTOP) could
        not: it is continued.
        """
        self.kill(signal.SIGCONT)
        now = time.monotonic()
        self._plan = [
            (now + seconds, self._terminate),
            (now + seconds + _TERM_SECONDS, self._kill_sessions),
        ]

    def _terminate(self) -> None:
        self.kill(signal.SIGTERM)
        self.kill(signal.SIGCONT)  # a stopped process gets the other signal when it goes on

    def _clear(self) -> None:
        """After a failure: wait until the processes of the children end by themselves (a rank sees
        that mpirun has gone), then kill them, and remove the folder of a killed mpirun."""
        deadline = time.monotonic() + (_TERM_SECONDS if not self._running() else 0)
        while any(child.session() for child in self._children) and time.monotonic() < deadline:
            time.sleep(0.1)
        self._kill_sessions()
        deadline = time.monotonic() + _TERM_SECONDS
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.01)
        for child in self._children:
            if child.name == "mpirun" and child.is_started:
                shutil.rmtree(Path(tempfile.gettempdir()) / f"ompi.{child.pid}", ignore_errors=True)

    def _kill_sessions(self) -> None:
        for child in self._children:
            child.kill_session()

    @contextlib.contextmanager
    def _catching_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python lets only the main thread handle signals
            return
        previous = {signum: signal.getsignal(signum) for signum in _STOPPING}
        for signum in _STOPPING:
            if previous[signum] is not signal.SIG_IGN:  # as under nohup
                signal.signal(signum, lambda number, frame: self._signals.append(number))
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler or signal.SIG_DFL)


def exit_code(code: int) -> int:
    """A job's for a child that ended with ``code``: 128 + n where signal n ended it (-n)."""
    return code if code > 0 else 128 - code


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
