"""Whether a job of this set-up outlives a rank: one is killed, and the other has to go on."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import Report
from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_RANK = "lightning_ring.tools.doctor.deaths"
_SECONDS, _TRIAL_SECONDS = 30.0, 20.0


def check(request: DoctorRequest) -> list[Finding]:
    """Two ranks without torch, of which one kills itself."""
    name = "a rank's death"
    if request.part:
        return []  # the host that starts the others tells
    if not sys.platform.startswith("linux"):
        found = f"ends the job: on {sys.platform} the kernel does not tell that a rank is dead"
        return [warning(name, found, "strategy='ring_elastic' runs on Linux only.")]
    job = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "2", "--min-ranks", "1", "--"]
    answer = request.ask([*job, sys.executable, "-m", _RANK], _SECONDS)
    told = dict(re.findall(r"(\w+)=([\d.]+)", answer.stdout))
    if answer.problem or told.keys() < {"died", "known", "ranks"}:
        advice = (
            f"strategy='ring_elastic' would not go on here. See what is said: {' '.join(job)} "
            f"python -m {_RANK}"
        )
        return [broken(name, f"was not survived in a trial: {answer.why}", advice)]
    seconds = float(told["known"]) - float(told["died"])
    found = (
        "is survived with strategy='ring_elastic': the other rank of a trial knew after "
        f"{seconds * 1e3:.0f} ms"
    )
    return [ok(name, found)]


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
