"""An error on one rank ends the job: an uncaught exception, or an exit code that is not 0.

``sys.exit`` is replaced because an exit handler cannot ask for the exit code: it would take
``sys.exit(3)`` for a normal end.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import time
from types import TracebackType
from typing import Any, NoReturn

from lightning_ring.errors import PeerFailedError
from lightning_ring.job.exit import end_process, in_one_line, leave_cause, say
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.watch.peers import comes_from_a_peer
from lightning_ring.job.watch.watch import JobWatch

# In these seconds a peer that failed first prints its error.
_FIRST_ERROR_SECONDS = 5.0


class _Installed:
    """The rank for which the hooks of this process act; at most one."""

    info: RankInfo | None = None
    watch: JobWatch | None = None
    pid = 0
    exit_code = 0


def end_job_on_error(info: RankInfo, watch: JobWatch | None = None) -> None:
    """Let an uncaught exception, or a ``sys.exit`` with an error, on this rank end the whole job.

    Call it once ``info`` is known, and again with a ``watch``. The traceback is printed first,
    except that of a `PeerFailedError`: the other rank prints the error that matters. At a normal
    end the rank says goodbye (`JobWatch.leave`).
    """
    first = _Installed.pid != os.getpid()
    _Installed.info, _Installed.watch, _Installed.pid = info, watch, os.getpid()
    if not first:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ is not None:
            # torch.distributed's hook collects this one's output until it returns.
            sys.stderr = sys.__stderr__
        if _Installed.info is None or os.getpid() != _Installed.pid:  # no job, or a forked child
            previous(kind, error, trace)
            return
        cause = _cause(error)
        if not isinstance(cause, PeerFailedError):
            # At once: other ranks' tracebacks would mix with these lines.
            stderr, text = sys.stderr, io.StringIO()
            with contextlib.redirect_stderr(text):
                previous(kind, error, trace)
            with contextlib.suppress(OSError, ValueError):
                stderr.write(text.getvalue())
                stderr.flush()
        _end_after(cause)

    sys.excepthook = hook
    sys.exit = _exit
    # Before MPI_Finalize, which mpi4py calls after Python's exit handlers.
    atexit.register(_goodbye)


def stop_ending_job() -> None:
    """The hooks do nothing until the next `end_job_on_error`."""
    _Installed.info = _Installed.watch = None


def _cause(error: BaseException) -> BaseException:
    """The `PeerFailedError` that explains a transport's ``error``, if known; else ``error``."""
    if isinstance(error.__cause__, PeerFailedError):
        return error.__cause__
    watch = _Installed.watch
    if watch is not None and comes_from_a_peer(error) and not isinstance(error, PeerFailedError):
        try:
            watch.blame(error)
        except PeerFailedError as peer:
            return peer
    return error


def _end_after(error: BaseException) -> NoReturn:
    info, watch = _Installed.info, _Installed.watch
    assert info is not None
    if isinstance(error, PeerFailedError):
        say(f"{info.name} ends: {error}")
        if watch is not None and (failure := watch.failure()) is not None:
            watch.report(error)
            watch.free_launcher(failure)
            watch.wait_until_gone(failure.rank, _FIRST_ERROR_SECONDS)
            time.sleep(0.2)  # the launcher blames the first that ends
        end_process(1)
    line = in_one_line(error)
    code = 130 if isinstance(error, KeyboardInterrupt) else 1
    _end_job(f"failed and ends the job: {line}", f"failed: {line}", error, code)


def _end_job(news: str, cause: str, error: BaseException, code: int) -> NoReturn:
    info, watch = _Installed.info, _Installed.watch
    assert info is not None
    say(f"{info.name} (host {os.uname().nodename}, pid {os.getpid()}) {news}")
    leave_cause(f"{info.name} {cause}")
    if watch is not None:
        watch.report(error)
    end_process(code)


class _Exit(SystemExit):
    """Knows whether it ended the script: the interpreter then reads ``code`` with no Python frame
    left above.
    """

    def __init__(self, code: Any = None) -> None:
        super().__init__(code)
        self._code = code

    @property
    def code(self) -> Any:  # type: ignore[override]
        if sys._getframe().f_back is None:
            _Installed.exit_code = (
                self._code if isinstance(self._code, int) else int(self._code is not None)
            )
        return self._code


_Exit.__name__ = _Exit.__qualname__ = "SystemExit"


def _exit(status: Any = None, /) -> NoReturn:
    """`sys.exit`, which tells the other ranks."""
    raise _Exit(status)


def _goodbye() -> None:
    info, watch, code = _Installed.info, _Installed.watch, _Installed.exit_code
    if info is None or os.getpid() != _Installed.pid:
        return
    if code:
        news = f"exits with code {code} and ends the job"
        _end_job(news, f"exited with code {code}", SystemExit(code), code)
    if watch is not None:
        watch.leave()
