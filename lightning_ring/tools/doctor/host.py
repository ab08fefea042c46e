"""What this host gives its ranks: cores and threads, shared memory, and a network."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from lightning_ring.host.cores import available_cores, bound_cores, cgroup_quota
from lightning_ring.job.rendezvous.interfaces import ipv4_addresses
from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_SHM = Path("/dev/shm")
_MIB = 2**20
_SHM_LEAST = 16  # MiB: two ranks' segments of Open MPI
_SHM_GOOD = 512  # batches in flight of a few data-loader workers


def check_threads(request: DoctorRequest) -> Iterator[Finding]:
    cores, usable, ranks = len(bound_cores()), available_cores(), request.ranks
    found = f"{ranks} rank(s) on {cores} of {os.cpu_count()} cores"
    if (quota := cgroup_quota()) < cores:
        found += f", {quota:g} at a time (the container's or job's quota)"
    if ranks > usable:
        yield warning(
            "cores",
            found,
            f"The ranks take turns. Start {usable}, or allow the job more cores: `taskset -cp $$` "
            "shows what binds this shell (Slurm: --cpus-per-task).",
        )
    else:
        yield ok("cores", found)
    yield _threads(request.environ.get("OMP_NUM_THREADS", ""), usable, ranks)


def _threads(text: str, usable: int, ranks: int) -> Finding:
    name, share, first = "threads", max(1, usable // ranks), text.split(",")[0]
    if not text:
        return ok(name, "OMP_NUM_THREADS is not set: each rank takes its share of the cores")
    threads = int(first) if first.isdigit() else 0
    found = f"OMP_NUM_THREADS={text}, {ranks} rank(s), {usable} core(s)"
    if threads < 1:
        what = "That is no number of threads."
    elif threads > share:
        what = f"{threads * ranks} threads wait for each other."
    elif threads * 2 <= share:
        what = "Cores stay idle."
    else:
        return ok(name, found)
    return warning(name, found, f"{what} Set OMP_NUM_THREADS={share}, or unset it.")


def check_memory(_: DoctorRequest) -> list[Finding]:
    name = str(_SHM)
    if not _SHM.is_dir():
        return [broken(name, "missing", f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {_SHM}")]
    usage = shutil.disk_usage(_SHM)
    free = usage.free / _MIB
    found = f"{free:,.0f} MiB free of {usage.total / _MIB:,.0f}"
    if free >= _SHM_GOOD:
        return [ok(name, found)]
    say = broken if free < _SHM_LEAST else warning
    low = say(
        name,
        found,
        "MPI and NCCL need it, and without it data-loader workers die of a bus error. Remove what "
        "an ended job left (`ls -l /dev/shm`: sm_segment.*, torch_*, nccl-*), or enlarge it: a "
        "container needs --shm-size=8g (--ipc=host), a host `mount -o remount,size=8g /dev/shm`.",
    )
    return [low]


def check_network(request: DoctorRequest) -> Iterator[Finding]:
    yield _hostname()
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        words = request.environ.get(variable, "").split(",")
        named = [word for word in words if word[:1] not in "^="]
        missing = [name for name in named if not any(one.startswith(name) for one in there)]
        if missing:
            yield broken(
                variable,
                f"{', '.join(missing)}: no such interface",
                f"There are: {', '.join(there)}. Name one of them, or unset {variable}.",
            )


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        own = [one for _, one in ipv4_addresses() if not one.startswith("127.")] or ["127.0.1.1"]
        return broken(
            "hostname",
            f"{name} resolves to nothing: {error.strerror}",
            f"Add a line to /etc/hosts, such as `{own[0]} {name}`.",
        )
    return ok("hostname", f"{name} resolves to {', '.join(addresses)}")
