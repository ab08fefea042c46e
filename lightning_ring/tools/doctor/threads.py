"""Cores, threads and what binds the one to the other."""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning_ring.host.cores import available_cores, bound_cores, cgroup_quota
from lightning_ring.tools.doctor.finding import Finding, ok, warning
from lightning_ring.tools.doctor.request import Request

_PLACING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_BINDING = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
)


def check(request: Request) -> list[Finding]:
    cores, quota = len(bound_cores()), cgroup_quota()
    usable = available_cores()
    return [
        _cores(cores, quota, usable, request.ranks),
        _threads(request.environ, usable, request.ranks),
        _placing(request.environ, request.ranks),
    ]


def _cores(cores: int, quota: float, usable: int, ranks: int) -> Finding:
    there = os.cpu_count() or 1
    found = f"{ranks} rank(s) on {cores} of {there} cores"
    if quota < cores:
        found += f", {quota:g} at a time (the container's or job's quota)"
    if ranks > usable and cores < there:
        advice = "Let them have more: `taskset -cp` shows what binds this shell (Slurm: --cpus-per-task)."
        return warning("cores", f"{found}: the ranks are bound to the same core(s)", advice)
    if ranks > usable:
        return warning("cores", f"{found}: the ranks take turns", f"Start {usable}, or allow the job more cores.")
    return ok("cores", found)


def _threads(environ: Mapping[str, str], usable: int, ranks: int) -> Finding:
    name = next((name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environ.get(name)), None)
    if name is None:
        return ok("threads", "OMP_NUM_THREADS is not set: each rank takes its share of the cores")
    first = environ[name].split(",")[0]
    threads = int(first) if first.isdigit() else 0
    good = max(1, usable // ranks)
    if threads < 1:
        return warning("threads", f"{name}={environ[name]} is no number", f"Set it to {good}, or unset it.")
    found = f"{name}={threads}, {ranks} rank(s), {usable} core(s)"
    if threads > 1 and threads * ranks > usable:
        advice = f"{threads * ranks} threads wait for each other. Set {name}={good}, or unset it."
        return warning("threads", found, advice)
    if threads * ranks * 2 <= usable:
        return warning("threads", found, f"Cores stay idle. Set {name}={good}, or unset it.")
    return ok("threads", found)


def _placing(environ: Mapping[str, str], ranks: int) -> Finding:
    """OpenMP places each process's threads by itself, knowing nothing of other ranks: all from the first core on."""
    placed = [
        f"{name}={environ[name]}" for name in _PLACING if environ.get(name, "false").lower() not in ("false", "none")
    ]
    if placed and ranks > 1:
        advice = "Every rank puts its threads on the same first cores. Unset it, or bind each rank to cores of its own."
        return warning("binding", ", ".join(placed), advice)
    bound = [f"{name}={environ[name]}" for name in _BINDING if environ.get(name, "none") != "none"]
    if bound:
        advice = "ringrun binds nothing; with plain mpirun this may give a rank, with all its threads, one core."
        return warning("binding", ", ".join(bound), advice)
    return ok("binding", "nothing binds ranks (plain mpirun binds each to a core: add --bind-to none, or use ringrun)")
