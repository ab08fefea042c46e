"""The hosts of a job, and the number of ranks on each."""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.launchers import tasks_per_node

_LOCAL = ("localhost", "127.0.0.1")
# The name goes to ssh and mpirun, which take one that begins with "-" for an option.
_ENTRY = re.compile(r"(?P<name>[\w.@][\w.@-]*)(:(?P<slots>0*[1-9]\d{0,5}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Host:
    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        return self.name in _LOCAL or self.name == os.uname().nodename


def parse_hosts(text: str) -> list[Host]:
    """``"host1:4,host2"``: 4 ranks on host1, one on host2."""
    return _distinct([_host(entry.strip(), entry.strip(), "-H") for entry in text.split(",")])


def read_hostfile(path: str) -> list[Host]:
    """`listed_hosts` in a file, at least one."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--hostfile {path} cannot be read: {error}.") from error
    hosts = listed_hosts(lines, 1, f"--hostfile {path}")
    if not hosts:
        raise ConfigurationError(
            f"--hostfile {path} names no host. Write one a line, such as `gpu01 slots=4`."
        )
    return hosts


def listed_hosts(lines: Iterable[str], slots: int, where: str) -> list[Host]:
    """One host a line, as Open MPI (``host slots=4``) and MPICH (``host:4``) write them, or without
    its ``slots``; ``#`` begins a comment.
    """
    hosts = []
    for number, line in enumerate(lines, start=1):
        if words := line.split("#")[0].split():
            given = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
            entry = words[0] if ":" in words[0] else f"{words[0]}:{given[0] if given else slots}"
            hosts.append(_host(entry, line.strip(), f"{where}, line {number}"))
    return _distinct(hosts)


def _host(entry: str, shown: str, where: str) -> Host:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise ConfigurationError(
            f"{where}: {shown!r:.200} is not host:slots with slots > 0, such as gpu01:4. A name "
            "has letters, digits and _ . @ - only."
        )
    return Host(found["name"], int(found["slots"] or 1))


def _distinct(hosts: list[Host]) -> list[Host]:
    """A host named twice has the slots of both."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return [Host(name, count) for name, count in slots.items()]


def check_slots(ranks: int, hosts: list[Host]) -> None:
    """Raise `ConfigurationError`, with both numbers, if ``ranks`` do not fit."""
    slots = sum(host.slots for host in hosts)
    if ranks > slots:
        described = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise ConfigurationError(
            f"-n {ranks} asks for more ranks than the {slots} slots of {described}. Raise the "
            f"slots, or start {slots}."
        )


def in_allocation(environ: Mapping[str, str]) -> bool:
    """Whether this process is in a batch system's allocation, which mpirun finds by itself."""
    names = {"SLURM_JOB_ID", "PBS_NODEFILE", "LSB_JOBID", "PE_HOSTFILE"}
    return not names.isdisjoint(environ)


def hosts_of_allocation(environ: Mapping[str, str]) -> list[Host]:
    """The nodes of this Slurm job with their tasks; this one is ``localhost``. Raises
    `ConfigurationError`: Slurm does not tell them.
    """
    ask = ["scontrol", "show", "hostnames", environ.get("SLURM_JOB_NODELIST", "")]
    try:
        names = subprocess.check_output(ask, text=True, timeout=30).split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"The nodes of Slurm's job {environ.get('SLURM_JOB_ID')} are not known ({error}). Name "
            "them with -H."
        ) from error
    tasks = tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")) or [1] * len(names)
    here = environ.get("SLURMD_NODENAME")
    return [
        Host("localhost" if name == here else name, count)
        for name, count in zip(names, tasks, strict=True)
    ]


def slots_of_allocation(environ: Mapping[str, str]) -> float:
    """The most ranks that mpirun starts in this Slurm job or step; infinite outside of Slurm.

    ``sbatch --ntasks=1 --cpus-per-task=8`` is one slot.
    """
    text = environ.get("SLURM_TASKS_PER_NODE", "") if "SLURM_JOB_ID" in environ else ""
    return sum(tasks_per_node(text)) or math.inf
