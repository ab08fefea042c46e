"""How many cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores(ranks_per_node: int = 1, cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores for one rank: what affinity and the container's CPU quota allow, divided by the ranks that share it.

    At least 1. Under ``mpirun --bind-to core`` each rank sees its own cores only: leave ``ranks_per_node`` at 1 there.
    """
    cores = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return max(1, int(min(cores, _quota(cgroup)) / ranks_per_node))


def _quota(cgroup: Path) -> float:
    """Cores by the quota of control groups, version 2 or 1; infinity without one."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return float("inf")
    return float("inf") if quota in ("max", "-1") else int(quota) / int(period)
