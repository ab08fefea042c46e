"""The report: of one host, of several, as text and as JSON."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_ring.tools.doctor.finding import Finding, State, ok, worst

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
        findings = [{"family": family} | asdict(finding) for family, several in families for finding in several]
        return {"host": self.host, "state": worst(self.findings), "findings": findings}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> HostReport:
        report = cls(read["host"])
        for entry in read["findings"]:
            finding = Finding(**{name: entry[name] for name in ("name", "state", "found", "advice")})
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
    """A line for each finding, and below it what to do."""
    width = max(60, min(shutil.get_terminal_size((120, 24)).columns, 160))
    shown = []
    for finding in findings:
        head = f"{finding.state:8} {finding.name:{_NAME}} "
        shown += textwrap.wrap(finding.found, width, initial_indent=head, subsequent_indent=" " * (_NAME + 10))
        if finding.advice:
            shown += textwrap.wrap(finding.advice, width, initial_indent="         -> ", subsequent_indent=" " * 12)
    return shown


def short(findings: Sequence[Finding]) -> list[Finding]:
    """What is not ok, and how much is."""
    bad = [finding for finding in findings if finding.state != "ok"]
    return [*bad, ok("all else" if bad else "everything", f"{len(findings) - len(bad)} checks")]


def last_line(hosts: Sequence[HostReport], between: Sequence[Finding]) -> str:
    states = [finding.state for host in hosts for finding in host.findings] + [finding.state for finding in between]
    num_broken, num_warnings = states.count("broken"), states.count("warning")
    bad = [f"{num_broken} broken"] if num_broken else []
    bad += [f"{num_warnings} warning{'s' if num_warnings > 1 else ''}"] if num_warnings else []
    return f"{len(states)} checks: {', '.join(bad) if bad else 'all ok'}"
