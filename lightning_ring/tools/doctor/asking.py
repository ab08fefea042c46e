"""The request to the doctor, and subprocesses with a time limit: they may hang, crash or be
missing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ring.job.exit import OPEN_MPI_LAUNCHERS, remove_segments
from lightning_ring.launch.processes import processes_of_sessions

# A launcher's variables for its ranks. The ranks that the doctor starts get variables of their own.
_OF_LAUNCHERS = re.compile(
    r"(OMPI|PMIX|PRTE|PMI|MV2_COMM_WORLD|JSM_NAMESPACE|FLUX_TASK|TORCHELASTIC)_.*"
    r"|MPI_LOCAL(RANKID|NRANKS)|FLUX_JOB_SIZE"
    r"|((LOCAL|NODE|GROUP|ROLE)_)?RANK|((LOCAL|GROUP|ROLE)_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)"
    r"|RING_(RANK|WORLD_SIZE|STORE|JOB|LAUNCHER_PID|STOP_SIGNAL)"
)
# the user's own, unless one of these started this process
_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")
_USUAL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class DoctorRequest:
    ranks: int  # to run on this host
    num_hosts: int
    seconds: float  # limit of each run of ranks and of every question
    launcher: str = ""  # name of the program that started this process as a rank, or empty
    part: bool = False  # this is one of several hosts that another doctor asks about
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    @property
    def child_environ(self) -> dict[str, str]:
        """The environment for processes that the doctor starts: without the variables of a
        launcher.
        """
        keeps = () if self.launcher in OPEN_MPI_LAUNCHERS else _SETTINGS
        return {
            name: value
            for name, value in self.environ.items()
            if name.startswith(keeps) or not _OF_LAUNCHERS.fullmatch(name)
        }

    def ask(self, command: Sequence[str], seconds: float) -> Answer:
        """`ask`, without a launcher's variables; ``seconds`` are those of a quiet host."""
        seconds = min(seconds, self.seconds) * max(1.0, self.seconds / _USUAL_SECONDS)
        return ask(command, seconds, self.child_environ)


_TOO_LATE = "did not end within"
_END_SECONDS = 8.0  # the longest time that ringrun takes to end its ranks
_running: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True, slots=True)
class Answer:
    stdout: str
    stderr: str
    problem: str  # the reason why there is no good answer; empty after exit code 0

    @property
    def why(self) -> str:
        """The last line on standard error, where Python puts the exception; else the problem."""
        last = self.stderr.strip().rpartition("\n")[2].strip()
        ended = self.problem.startswith("ended with exit code")
        return last if last and ended else f"it {self.problem or 'said nothing'}"

    def advice(self, advice: str) -> str:
        """What to do: ``advice``, unless time was too short."""
        if not self.problem.startswith(_TOO_LATE):
            return advice
        return (
            f"The load of this host is {os.getloadavg()[0]:.0f}, on {os.cpu_count()} cores. Ask "
            f"again when it is quiet, or with --timeout {5 * _USUAL_SECONDS:g}."
        )


def ask(command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> Answer:
    """Run ``command`` for at most ``seconds``; past them it ends, with all that it started."""
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer("", "", f"cannot be run: {error.strerror}")
    _running.add(process)
    try:
        stdout, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        stdout = stderr = ""
        # a grandchild in another session may hold the pipe
        with contextlib.suppress(subprocess.TimeoutExpired):
            stdout, stderr = process.communicate(timeout=2)
        return Answer(stdout, stderr, f"{_TOO_LATE} {seconds:g} s")
    finally:
        _running.discard(process)
    code = process.returncode
    if code < 0:
        return Answer(stdout, stderr, f"was ended by signal {-code} ({signal.Signals(-code).name})")
    return Answer(stdout, stderr, f"ended with exit code {code}" if code else "")


def _end(process: subprocess.Popen[str]) -> None:
    """End ``process`` and its children, in order if it can."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_SECONDS)
    for pid in processes_of_sessions({process.pid}):
        remove_segments(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end_all() -> None:
    """End all processes: the doctor was told to stop."""
    for process in list(_running):
        _end(process)
