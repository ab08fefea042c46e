"""Is this shell what it seems: no rank of a job that is over, no variables that send ranks elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import launcher_variables
from lightning_ring.launch.hosts import in_allocation
from lightning_ring.tools.doctor.finding import Finding, broken, ok
from lightning_ring.tools.doctor.request import Request

_LAUNCHERS = (
    *("mpirun", "mpiexec", "prterun", "prted", "orted", "hydra_pmi_proxy", "slurmstepd"),
    *("torchrun", "torch.distributed.run", "ringrun", "lightning_ring.cli.ringrun"),
)


def check(request: Request) -> list[Finding]:
    if request.part and request.launcher:
        return []  # its variables are those by which the doctor of another host started this one
    name = "launcher"
    advice = (
        "Variables of a launcher are left in this shell: `python train.py` would wait for ranks that nobody starts. "
    )
    try:
        found = launcher_variables(request.environ)
    except RankDiscoveryError as error:
        return [broken(name, str(error), f"{advice}Unset them.")]
    if found is None:
        where = "inside a batch system's allocation" if in_allocation(request.environ) else "this is an ordinary shell"
        return [ok(name, f"no launcher's variables: {where}")]
    place = f"rank {found.rank} of {found.world_size}, by the variables of {found.launcher}"
    if request.launcher:
        return [ok(name, f"{place}, started by {request.launcher}")]
    names = " ".join(sorted(set(request.environ) - set(request.child_environ)))
    return [broken(name, f"{place}, but no launcher started this process", f"{advice}unset {names}")]


def living_launcher() -> str:
    """Name of the launcher among this process's ancestors, empty if there is none."""
    return next((name for words in _ancestors() for name in map(os.path.basename, words) if name in _LAUNCHERS), "")


def _ancestors() -> Iterator[list[str]]:
    """The first words of the command line of each process above this one (Linux)."""
    pid = os.getppid()
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        yield words[:4]
        pid = int(stat.rpartition(")")[2].split()[1])
