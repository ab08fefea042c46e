"""Runs programs that may hang, crash or be missing, and always comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ring.job.exit import remove_segments
from lightning_ring.launch.supervisor import processes_of_sessions

_END_SECONDS = 8.0  # what ringrun takes at most to end its ranks
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True, slots=True)
class Answer:
    """``problem`` says in words why there is no good answer, and is empty after exit code 0."""

    stdout: str
    stderr: str
    problem: str

    @property
    def last_error(self) -> str:
        """The last line on standard error, where Python puts what was raised; else the problem."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else self.problem


def ask(command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Run ``command`` for at most ``seconds``; past them it ends, with all that it started."""
    try:
        process = start(command, environ)
    except OSError as error:
        return Answer("", "", f"cannot be run: {error.strerror}")
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        end(process)
        stdout, stderr = _what_it_wrote(process)
        return Answer(stdout, stderr, f"did not end within {seconds:g} s")
    finally:
        _running.discard(process)
    code = process.returncode
    if code < 0:
        return Answer(stdout, stderr, f"was ended by signal {-code} ({signal.Signals(-code).name})")
    return Answer(stdout, stderr, f"ended with exit code {code}" if code else "")


def start(
    command: Sequence[str], environ: Mapping[str, str] | None, *, answering: bool = False
) -> subprocess.Popen[str]:
    """Start ``command`` in a session of its own; whoever starts it calls `end`, or lets `end_all` do it.

    ``answering``: its standard input is a pipe.

    Raises:
        OSError: It cannot be run.
    """
    process = subprocess.Popen(
        list(command),
        env=dict(environ) if environ is not None else None,
        stdin=subprocess.PIPE if answering else subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _running.add(process)
    return process


def end(process: subprocess.Popen[str]) -> None:
    """End ``process``, in order if it can, and what it started."""
    for signum, patience in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, 2.0)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.send_signal(signum)
            process.wait(timeout=patience)
            break
    for pid in processes_of_sessions({process.pid}):
        remove_segments(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _running.discard(process)


def _what_it_wrote(process: subprocess.Popen[str]) -> tuple[str, str]:
    with contextlib.suppress(subprocess.TimeoutExpired):  # a grandchild in another session may hold the pipe
        return process.communicate(timeout=2)
    return "", ""


def end_all() -> None:
    """End what still runs: the doctor was told to stop."""
    for process in list(_running):
        end(process)
