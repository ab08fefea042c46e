"""Whether a job of this set-up outlives a rank: one is killed, and the other has to go on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import Report
from lightning_ring.job.exit import MPI_LAUNCHERS
from lightning_ring.tools.doctor.asking import DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_NAME = "a rank's death"
_START = "ringrun -n N --min-ranks M python train.py, or plain python train.py"
_ENDING_ALL = (*MPI_LAUNCHERS, "torchrun", "torch.distributed.run")
_RANK = "lightning_ring.tools.doctor.deaths"
_SECONDS, _TRIAL_SECONDS = 30.0, 20.0
_SLOW = 2.0  # seconds from a death to the word of it


def check(request: DoctorRequest) -> list[Finding]:
    if request.part:
        return []  # the host that starts the others tells
    if not sys.platform.startswith("linux"):
        found = f"ends the job: on {sys.platform} the kernel does not tell that a rank is dead"
        return [warning(_NAME, found, "strategy='ring_elastic' runs on Linux only.")]
    findings = [_planted(request)]
    if request.launcher in _ENDING_ALL:
        found = f"ends a job of {request.launcher}, which ends all ranks with one"
        findings.append(
            warning("launcher of ranks", found, f"strategy='ring_elastic' goes on under: {_START}.")
        )
    return findings


def _planted(request: DoctorRequest) -> Finding:
    """Two ranks without torch, of which one kills itself."""
    job = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "2", "--min-ranks", "1", "--"]
    answer = ask(
        [*job, sys.executable, "-m", _RANK], request.at_most(_SECONDS), request.child_environ
    )
    told = dict(re.findall(r"(\w+)=([\d.]+)", answer.stdout))
    if answer.problem or not {"died", "known", "ranks"} <= told.keys():
        advice = (
            f"strategy='ring_elastic' would not go on here. See what is said: {' '.join(job)} "
            f"python -m {_RANK}"
        )
        return broken(
            _NAME,
            f"was not survived in a trial: {answer.last_error or 'a rank said nothing'}",
            advice,
        )
    seconds = float(told["known"]) - float(told["died"])
    found = (
        "is survived with strategy='ring_elastic': the other rank of a trial knew after "
        f"{seconds * 1e3:.0f} ms"
    )
    if seconds > _SLOW:
        return warning(
            _NAME,
            found,
            "The process that starts the ranks gets too little of a core: leave it some.",
        )
    return ok(_NAME, found)


def main() -> None:
    """Process 1 kills itself. Process 0 prints when it knew, and how many ranks go on."""
    member = Member()
    member.open()
    member.report(Report())
    member.next_view(_TRIAL_SECONDS)
    if member.number == 1:
        print(f"died={time.monotonic():.6f}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    member.is_over(_TRIAL_SECONDS)
    print(f"known={time.monotonic():.6f}", flush=True)
    member.report(Report(1))
    print(f"ranks={len(member.next_view(_TRIAL_SECONDS).members)}", flush=True)
    member.finish()


if __name__ == "__main__":
    main()
