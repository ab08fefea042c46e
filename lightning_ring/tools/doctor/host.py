"""What this host gives its ranks: cores and threads, shared memory and files, and a network."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from lightning_ring.host.cores import available_cores, bound_cores, cgroup_quota
from lightning_ring.job.rendezvous.interfaces import ipv4_addresses, reachable_candidates
from lightning_ring.tools.doctor.asking import DoctorRequest
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning

_SHM = Path("/dev/shm")
_MIB = 2**20
_SHM_LEAST = 16  # MiB: two ranks' segments of Open MPI
_SHM_GOOD = 512  # batches in flight of a few data-loader workers
_TMP_LEAST = 64
_FILES_LEAST, _FILES_GOOD = 256, 1024
_CONNECT_SECONDS = 3.0


def check_threads(request: DoctorRequest) -> Iterator[Finding]:
    cores, usable, ranks = len(bound_cores()), available_cores(), request.ranks
    found = f"{ranks} rank(s) on {cores} of {os.cpu_count()} cores"
    if (quota := cgroup_quota()) < cores:
        found += f", {quota:g} at a time (the container's or job's quota)"
    if ranks > usable:
        advice = (
            f"The ranks take turns. Start {usable}, or allow the job more cores: `taskset -cp $$` "
            "shows what binds this shell (Slurm: --cpus-per-task)."
        )
        yield warning("cores", found, advice)
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


def check_memory(request: DoctorRequest) -> Iterator[Finding]:
    yield _dev_shm()
    yield _temporary_folder(request.environ)
    yield _open_files()


def _dev_shm() -> Finding:
    name = str(_SHM)
    if not _SHM.is_dir():
        return broken(name, "missing", f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {_SHM}")
    usage = shutil.disk_usage(_SHM)
    free = usage.free / _MIB
    found = f"{free:,.0f} MiB free of {usage.total / _MIB:,.0f}"
    if free >= _SHM_GOOD:
        return ok(name, found)
    advice = (
        "MPI and NCCL need it, and without it data-loader workers die of a bus error. Remove what "
        "an ended job left (`ls -l /dev/shm`: sm_segment.*, torch_*, nccl-*), or enlarge it: a "
        "container needs --shm-size=8g (or --ipc=host), a host `mount -o remount,size=8g /dev/shm`."
    )
    return (broken if free < _SHM_LEAST else warning)(name, found, advice)


def _temporary_folder(environ: Mapping[str, str]) -> Finding:
    name, folder = "temporary folder", environ.get("TMPDIR") or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
        free = shutil.disk_usage(folder).free / _MIB
    except OSError as error:
        found, free = f"{folder} cannot be written: {error.strerror}", 0
    else:
        found = f"{folder}, {free:,.0f} MiB free"
    if free >= _TMP_LEAST:
        return ok(name, found)
    advice = "MPI and torch keep sockets and files there. Make room, or point TMPDIR elsewhere."
    return broken(name, found, advice)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if soft == resource.RLIM_INFINITY else f"limit {soft}"
    if soft == resource.RLIM_INFINITY or soft >= _FILES_GOOD:
        return ok("open files", found)
    most = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    advice = (
        "A rank has a connection to every other one, files for its data and pipes to its workers: "
        f"`ulimit -n {most}` before the job, or ask for more (limits.conf: nofile 65536)."
    )
    return (broken if soft < _FILES_LEAST else warning)("open files", found, advice)


def check_network(request: DoctorRequest) -> Iterator[Finding]:
    yield _hostname()
    yield _listening(request)
    there = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        words = request.environ.get(variable, "").split(",")
        named = [word for word in words if word and word[0] not in "^="]
        missing = [name for name in named if not any(one.startswith(name) for one in there)]
        if missing:
            advice = f"There are: {', '.join(there)}. Name one of them, or unset {variable}."
            yield broken(variable, f"{', '.join(missing)}: no such interface", advice)


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        addresses = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except OSError as error:
        own = [one for _, one in ipv4_addresses() if not one.startswith("127.")] or ["127.0.1.1"]
        advice = f"Add a line to /etc/hosts, such as `{own[0]} {name}`."
        return broken("hostname", f"{name} resolves to nothing: {error.strerror}", advice)
    return ok("hostname", f"{name} resolves to {', '.join(addresses)}")


def _listening(request: DoctorRequest) -> Finding:
    """A rank listens, and is reached, at each address of this host."""
    name, loopback, failed = "listening", "127.0.0.1", {}
    try:
        with socket.create_server(("", 0)) as door:
            addresses = [loopback, *reachable_candidates(request.environ)]
            for address in addresses:
                where = address, door.getsockname()[1]
                try:
                    socket.create_connection(where, timeout=_CONNECT_SECONDS).close()
                except OSError as error:
                    failed[address] = error.strerror or error
    except OSError as error:
        advice = "A sandbox or a limit forbids it (ulimit -n)."
        return broken(name, f"no port can be opened: {error.strerror}", advice)
    if not failed:
        return ok(name, f"reached at {', '.join(addresses)}")
    found = ", ".join(f"{address}: {error}" for address, error in failed.items())
    say = broken if request.num_hosts > 1 or loopback in failed else warning
    advice = "A firewall drops what this host sends to itself: allow TCP from its own addresses."
    return say(name, found, advice)
