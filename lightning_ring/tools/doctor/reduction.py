"""Ranks that start, meet and reduce as a job's ranks do."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ring.launch.hosts import Host
from lightning_ring.tools.doctor.asking import Answer, DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning
from lightning_ring.tools.doctor.launching import chosen_mpirun
from lightning_ring.tools.doctor.packages import torch_facts

_PREFIX = "lightning_ring.tools.doctor "  # as in rank.py, which imports torch
_MOST_SAID = 500  # letters
_NOISE = (
    "Traceback",
    "File ",
    "lightning_ring: /",
    "lightning_ring: 2 processes",
    "During handling",
    "^",
    "~",
)


@dataclass(frozen=True, slots=True)
class Trial:
    """The reports of ranks."""

    how: str  # they were started
    asked: Sequence[str]
    reports: Sequence[dict[str, Any]]
    answer: Answer

    def ended(self, backend: str) -> dict[str, Any] | None:
        return next((r for r in self.reports if r.get("backend") == backend and r["ended"]), None)


def check(request: DoctorRequest) -> list[Finding]:
    """Two ranks on this host."""
    findings: list[Finding] = []
    works = False
    if chosen_mpirun(request) is not None:
        trial = _try(request, ["-n", "2"], "cpu", ("auto", "gloo", "mpi"), "2 ranks through mpirun")
        works = not trial.answer.problem
        findings += [*_findings(trial), *_cores(trial)]
    if not works:
        trial = _try(
            request, ["-n", "2", "--no-mpi"], "cpu", ("auto", "gloo"), "2 ranks without MPI"
        )
        findings += [*_findings(trial), *([] if findings else _cores(trial))]
        works = not trial.answer.problem
    if works and len(torch_facts(request)[0].get("gpus") or []) > 1:
        findings += _findings(_try(request, ["-n", "2"], "gpu", ("auto",), "2 GPUs"))
    return findings


def check_across(hosts: Sequence[Host], request: DoctorRequest) -> list[Finding]:
    """One rank on each host."""
    where = ["-n", str(len(hosts)), "-H", ",".join(f"{host.name}:1" for host in hosts)]
    trial = _try(
        request, where, "cpu", ("auto", "gloo", "mpi"), f"a rank on each of {len(hosts)} hosts"
    )
    return _findings(trial)


def _try(
    request: DoctorRequest, where: Sequence[str], device: str, backends: Sequence[str], how: str
) -> Trial:
    rank = [sys.executable, "-m", "lightning_ring.tools.doctor.rank", device, *backends]
    command = [sys.executable, "-m", "lightning_ring.cli.ringrun", *where, "--", *rank]
    # when it is late, ranks have nothing to save: ringrun ends them at once
    answer = ask(command, request.seconds, request.child_environ | {"RING_STOP_GRACE": "0"})
    lines = [line for line in answer.stdout.splitlines() if line.startswith(_PREFIX)]
    return Trial(how, backends, [json.loads(line.removeprefix(_PREFIX)) for line in lines], answer)


def _findings(trial: Trial) -> list[Finding]:
    findings: list[Finding] = []
    for backend in trial.asked:
        report = trial.ended(backend)
        if report is None:
            return [*findings, _failure(trial, backend)]
        name, found = f"all-reduce, {backend}", f"{trial.how}: every sum right ({report['kind']})"
        said = " ".join(report["notes"])
        findings.append(
            warning(name, found, f"It works, but ranks warn: {said}") if said else ok(name, found)
        )
    if trial.answer.problem:
        findings.append(_failure(trial, "afterwards"))
    return findings


def _failure(trial: Trial, backend: str) -> Finding:
    started = any(report.get("backend") == backend for report in trial.reports)
    name = f"all-reduce, {backend}" if started or backend == "afterwards" else "all-reduce"
    when = "" if trial.reports or backend == "afterwards" else ", before the ranks had met"
    found = f"{trial.how}: it {trial.answer.problem or 'ended without a word'}{when}"
    # not how we ended them
    said = what_was_said(trial.answer.stderr.partition("lightning_ring: SIGTERM")[0])
    if said:
        found += f": {said}"
    advice = "Mend what is broken above first. "
    if "ringrun: " not in said:
        advice += (
            "`lightning-ring bench -n 2 --sizes 4K --seconds 0.01` shows all that the ranks say."
        )
    return broken(name, found, advice.strip())


def what_was_said(stderr: str) -> str:
    """The most informative text of ranks and launchers: the first error, else the first block
    between dashed lines.
    """
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    error = next((line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)), None)
    if error is not None:
        return error[:_MOST_SAID]
    blocks = re.split(r"^[-=*]{5,}$", "\n".join(lines), flags=re.MULTILINE)
    return next((" ".join(block.split()) for block in blocks if block.strip()), "")[:_MOST_SAID]


def _cores(trial: Trial) -> list[Finding]:
    """Ranks that were given one core, and the same one."""
    ranks: list[dict[str, Any]] = next(
        (report["ranks"] for report in trial.reports if "ranks" in report), []
    )
    places = Counter((rank["host"], tuple(rank["cores"])) for rank in ranks)
    crowded = [cores for (_, cores), count in places.items() if count > 1 and len(cores) == 1]
    if not crowded:
        return []
    advice = (
        "Computation and communication of both take turns there. `taskset -cp $$` shows what "
        "binds this shell."
    )
    return [warning("cores of the ranks", f"both ranks run on core {crowded[0][0]} alone", advice)]
