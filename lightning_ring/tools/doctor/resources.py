"""Cores, threads, shared memory and files of this host, and their limits."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from lightning_ring.host.cores import available_cores, bound_cores, cgroup_quota
from lightning_ring.tools.doctor.asking import DoctorRequest, ask
from lightning_ring.tools.doctor.findings import Finding, broken, ok, warning


def check_threads(request: DoctorRequest) -> list[Finding]:
    cores, quota = len(bound_cores()), cgroup_quota()
    usable = available_cores()
    return [
        _cores(cores, quota, usable, request.ranks),
        _threads(request.environ, usable, request.ranks),
    ]


def _cores(cores: int, quota: float, usable: int, ranks: int) -> Finding:
    there = os.cpu_count() or 1
    found = f"{ranks} rank(s) on {cores} of {there} cores"
    if quota < cores:
        found += f", {quota:g} at a time (the container's or job's quota)"
    if ranks > usable and cores < there:
        advice = (
            "Let them have more: `taskset -cp` shows what binds this shell (Slurm: "
            "--cpus-per-task)."
        )
        return warning("cores", f"{found}: the ranks are bound to the same core(s)", advice)
    if ranks > usable:
        return warning(
            "cores",
            f"{found}: the ranks take turns",
            f"Start {usable}, or allow the job more cores.",
        )
    return ok("cores", found)


def _threads(environ: Mapping[str, str], usable: int, ranks: int) -> Finding:
    name = next(
        (name for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if environ.get(name)), None
    )
    if name is None:
        return ok("threads", "OMP_NUM_THREADS is not set: each rank takes its share of the cores")
    first = environ[name].split(",")[0]
    threads = int(first) if first.isdigit() else 0
    good = max(1, usable // ranks)
    if threads < 1:
        return warning(
            "threads", f"{name}={environ[name]} is no number", f"Set it to {good}, or unset it."
        )
    found = f"{name}={threads}, {ranks} rank(s), {usable} core(s)"
    if threads > 1 and threads * ranks > usable:
        advice = f"{threads * ranks} threads wait for each other. Set {name}={good}, or unset it."
        return warning("threads", found, advice)
    if threads * ranks * 2 <= usable:
        return warning("threads", found, f"Cores stay idle. Set {name}={good}, or unset it.")
    return ok("threads", found)


_SHM = Path("/dev/shm")
_MIB = 2**20
_SHM_LEAST = 16 * _MIB  # two ranks' segments of Open MPI
_SHM_GOOD = 512 * _MIB  # batches in flight of a few data-loader workers
_TMP_LEAST = 64 * _MIB
_FILES_LEAST, _FILES_GOOD = 256, 1024
_MAP = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, 4096)
assert memory[:5] == b"hello", memory[:5]
memory[:5] = b"there"
"""


def check_memory(request: DoctorRequest) -> list[Finding]:
    return [*_dev_shm(), _memfd(request), _temporary_folder(), _open_files()]


def _dev_shm() -> list[Finding]:
    if not sys.platform.startswith("linux"):
        return []
    name = "/dev/shm"
    if not _SHM.is_dir() or not os.access(_SHM, os.W_OK | os.X_OK):
        return [
            broken(
                name,
                "missing, or not writable",
                f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {_SHM}",
            )
        ]
    usage = shutil.disk_usage(_SHM)
    found = f"{usage.free / _MIB:,.0f} MiB free of {usage.total / _MIB:,.0f}"
    bigger = (
        "a container needs --shm-size=8g (or --ipc=host), a host `mount -o remount,size=8g "
        "/dev/shm`"
    )
    if usage.free < _SHM_LEAST:
        advice = (
            "Remove what an ended job left (`ls -l /dev/shm`: sm_segment.*, torch_*, nccl-*), or "
            "enlarge it: "
        )
        return [
            broken(name, found, f"MPI, NCCL and data-loader workers need it. {advice}{bigger}.")
        ]
    if usage.free < _SHM_GOOD:
        return [warning(name, found, f"Data-loader workers may die of a bus error: {bigger}.")]
    return [ok(name, found)]


def _memfd(request: DoctorRequest) -> Finding:
    """One process makes a file without a name, another maps it by its number and writes, as
    ranks of a node do.
    """
    name = "shared memory"
    otherwise = "Ranks of one node will use MPI or Gloo, which is slower."
    if not hasattr(os, "memfd_create"):
        return warning(name, "this system has no memfd_create (Linux has)", otherwise)
    file = os.memfd_create("lightning_ring-doctor", os.MFD_CLOEXEC)
    try:
        os.write(file, b"hello".ljust(4096, b"\0"))
        path = f"/proc/{os.getpid()}/fd/{file}"
        answer = ask([sys.executable, "-c", _MAP, path], request.at_most(10), request.child_environ)
        if answer.problem or os.pread(file, 5, 0) != b"there":
            advice = (
                f"{otherwise} Ranks must see each other in /proc: one container (or --pid=host), "
                "one user."
            )
            return warning(name, f"another process could not map it: {answer.last_error}", advice)
    except OSError as error:
        return warning(name, f"cannot be made: {error}", otherwise)
    finally:
        os.close(file)
    return ok(name, "made here, and written by another process")


def _temporary_folder() -> Finding:
    name = "temporary folder"
    asked = next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), None)
    folder = asked or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        advice = (
            "MPI and torch keep sockets and files there. Make it writable, or point TMPDIR to a "
            "folder that is."
        )
        return broken(name, f"{folder} cannot be written: {error.strerror}", advice)
    free = shutil.disk_usage(folder).free
    if free < _TMP_LEAST:
        return broken(
            name,
            f"{folder} has {free / _MIB:.0f} MiB free",
            "Free some, or point TMPDIR elsewhere.",
        )
    return ok(name, f"{folder}, {free / _MIB:,.0f} MiB free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= _FILES_GOOD:
        return ok("open files", found)
    most = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
    ask_for = "ask for more (limits.conf: nofile 65536)"
    more = f"`ulimit -n {most}` before the job" if int(most) >= _FILES_GOOD else ask_for
    advice = (
        "A rank has a connection to every other one, files for its data and pipes to its workers: "
        f"{more}."
    )
    return (broken if soft < _FILES_LEAST else warning)("open files", f"limit {found}", advice)
