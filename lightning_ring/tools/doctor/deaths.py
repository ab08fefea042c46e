"""Whether a job of this set-up outlives a rank: one is killed, and the other has to go on."""

from __future__ import annotations

import re
import sys

from lightning_ring.job.exit import MPI_LAUNCHERS
from lightning_ring.tools.doctor.asking import DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_NAME = "a rank's death"
_START = "ringrun -n N --min-ranks M python train.py, or plain python train.py"
_ENDING_ALL = (*MPI_LAUNCHERS, "torchrun", "torch.distributed.run")
_RANK = "lightning_ring.tools.doctor.dying_rank"
_SECONDS = 30.0
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
    return [*findings, _steward(request), _min_ranks(request)]


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


def _steward(request: DoctorRequest) -> Finding:
    if request.num_hosts == 1:
        return ok("steward", "the process that starts the ranks: its death ends all of them")
    found = (
        "on the host that runs ringrun, whose loss ends the job; the other "
        f"{request.num_hosts - 1} may go"
    )
    return ok("steward", found)


def _min_ranks(request: DoctorRequest) -> Finding:
    ranks = request.ranks * request.num_hosts
    found = (
        f"with {ranks} ranks any number up to {ranks - 1} may die; --min-ranks M (min_ranks=) lets "
        f"{ranks} - M die"
    )
    if request.num_hosts > 1:
        found += f", so a host of {request.ranks} needs M <= {ranks - request.ranks}"
    return ok("min_ranks", found)
