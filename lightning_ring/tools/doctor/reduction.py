"""Ranks that start, meet and reduce as a job's ranks do."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lightning_ring.launch.hosts import Host
from lightning_ring.tools.doctor.asking import Answer, DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning, worst
from lightning_ring.tools.doctor.launching import chosen_mpirun
from lightning_ring.tools.doctor.packages import torch_facts

_PREFIX = "lightning_ring.tools.doctor "  # as in rank.py, which imports torch
_MOST_SAID = 500  # letters
_NOISE = (
    "Traceback",
    "File ",
    "lightning_ring: /",
    "lightning_ring: 2 ranks of",
    "During handling",
    "^",
    "~",
)


def check(request: DoctorRequest) -> Iterator[Finding]:
    """Two ranks on this host."""
    here, found = ("-n", "2"), []
    if chosen_mpirun(request):
        found = _trial(request, here, "cpu auto gloo mpi", "2 ranks through mpirun")
        yield from found
    if not found or worst(found) == "broken":
        found = _trial(request, (*here, "--no-mpi"), "cpu auto gloo", "2 ranks without MPI")
        yield from found
    if worst(found) != "broken" and len(torch_facts(request)[0].get("gpus") or ()) > 1:
        yield from _trial(request, here, "gpu auto", "2 GPUs")


def check_across(hosts: Sequence[Host], request: DoctorRequest) -> list[Finding]:
    """One rank on each host."""
    where = ["-n", str(len(hosts)), "-H", ",".join(f"{host.name}:1" for host in hosts)]
    return _trial(request, where, "cpu auto gloo mpi", f"a rank on each of {len(hosts)} hosts")


def _trial(request: DoctorRequest, where: Sequence[str], what: str, how: str) -> list[Finding]:
    """``what``: a device, and the backends to try. ``how`` the ranks are started."""
    rank = [sys.executable, "-m", "lightning_ring.tools.doctor.rank", *what.split()]
    command = [sys.executable, "-m", "lightning_ring.cli.ringrun", *where, "--", *rank]
    # when it is late, ranks have nothing to save: ringrun ends them at once
    answer = ask(command, request.seconds, request.child_environ | {"RING_STOP_GRACE": "0"})
    lines = [line for line in answer.stdout.splitlines() if line.startswith(_PREFIX)]
    reports = [json.loads(line.removeprefix(_PREFIX)) for line in lines]
    ended = {report["backend"]: report for report in reports if report["kind"]}
    findings: list[Finding] = []
    for backend in what.split()[1:]:
        name = f"all-reduce, {backend}"
        if backend not in ended:
            return [*findings, _failure(name, how, reports, answer)]
        found = f"{how}: every sum right ({ended[backend]['kind']})"
        said = " ".join(ended[backend]["notes"])
        findings.append(
            warning(name, found, f"It works, but ranks warn: {said}") if said else ok(name, found)
        )
    if answer.problem:
        findings.append(_failure("all-reduce, afterwards", how, reports, answer))
    return findings


def _failure(name: str, how: str, reports: Sequence[Any], answer: Answer) -> Finding:
    found = f"{how}: it {answer.problem or 'ended without a word'}"
    if not reports:
        name, found = "all-reduce", f"{found}, before the ranks had met"
    # not how we ended them
    said = what_was_said(answer.stderr.partition("lightning_ring: SIGTERM")[0])
    advice = "Mend what is broken above first."
    if "ringrun: " not in said:
        advice += (
            " `lightning-ring bench -n 2 --sizes 4K --seconds 0.01` shows all that the ranks say."
        )
    return broken(name, f"{found}: {said}" if said else found, advice)


def what_was_said(stderr: str) -> str:
    """The most informative text of ranks and launchers: the first error, else the first block
    between dashed lines.
    """
    lines = [line.strip() for line in stderr.splitlines()]
    lines = [line for line in lines if line and not line.startswith(_NOISE)]
    error = next((line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)), None)
    blocks = re.split(r"^[-=*]{5,}$", "\n".join(lines), flags=re.MULTILINE)
    said = error or next((block for block in blocks if block.strip()), "")
    return " ".join(said.split())[:_MOST_SAID]
