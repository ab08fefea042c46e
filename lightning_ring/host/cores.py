"""The cores that this process may run on, and the number of them at a time. Without torch: tools
start at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def bound_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def available_cores(ranks_per_node: int = 1) -> int:
    """Cores for one rank, at least 1: what affinity and processor quotas allow, divided by the
    ranks that share it.

    Under ``mpirun --bind-to core`` each rank sees its own cores only: leave ``ranks_per_node`` at 1
    there.
    """
    return max(1, int(min(len(bound_cores()), cgroup_quota()) / ranks_per_node))


def cgroup_quota() -> float:
    """The number of cores at a time that the processor quotas over this process allow; infinite
    without a quota.

    A container sees its own control group as the root; under systemd and Slurm a process lives in
    one below it, and every group from there upwards limits it. Sources: the kernel's cgroup-v2.rst
    (``cpu.max``) and sched-bwc.rst (version 1).
    """
    groups = _own_groups(_CGROUP, "")
    quotas = [_quota(group, "cpu.max") for group in groups if (group / "cpu.max").exists()]
    version_1 = _own_groups(_CGROUP / "cpu", "cpu")
    return min(
        quotas or (_quota(group, "cpu.cfs_quota_us", "cpu.cfs_period_us") for group in version_1)
    )


def _own_groups(root: Path, controller: str) -> Iterator[Path]:
    """``root``, this process's group, and those between; ``controller`` is empty in version 2."""
    yield root
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controller in controllers.split(","):
            group = root / path.lstrip("/")
            while root in group.parents:
                yield group
                group = group.parent


def _quota(group: Path, *files: str) -> float:
    """Of two numbers in ``files``: the quota, ``max`` or -1 if there is none, and its period."""
    try:
        texts = [(group / name).read_text() for name in files]
        quota, period = map(int, " ".join(texts).split())
    except (OSError, ValueError):
        return math.inf
    return quota / period if quota >= 0 else math.inf
