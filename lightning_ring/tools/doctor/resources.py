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

_PLACING = ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_BINDING = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
)


def check_threads(request: DoctorRequest) -> list[Finding]:
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


def _placing(environ: Mapping[str, str], ranks: int) -> Finding:
    """OpenMP places each process's threads by itself, knowing nothing of other ranks: all from
    the first core on.
    """
    unset = ("false", "none")
    placed = [
        f"{name}={environ[name]}"
        for name in _PLACING
        if environ.get(name, "false").lower() not in unset
    ]
    if placed and ranks > 1:
        advice = (
            "Every rank puts its threads on the same first cores. Unset it, or bind each rank to "
            "cores of its own."
        )
        return warning("binding", ", ".join(placed), advice)
    bound = [f"{name}={environ[name]}" for name in _BINDING if environ.get(name, "none") != "none"]
    if bound:
        advice = (
            "ringrun binds nothing; with plain mpirun this may give a rank, with all its threads, "
            "one core."
        )
        return warning("binding", ", ".join(bound), advice)
    return ok(
        "binding",
        "nothing binds ranks (plain mpirun binds each to a core: add --bind-to "
        "none, or use ringrun)",
    )


_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_MIB = 2**20
_SHM_LEAST = 16 * _MIB  # two ranks' segments of Open MPI
_SHM_GOOD = 512 * _MIB  # batches in flight of a few data-loader workers
_TMP_LEAST = 64 * _MIB
_FILES_LEAST, _FILES_GOOD = 256, 1024
# bytes, Linux; Python's data-loader workers put "/pymp-xxxxxxxx/listener-xxxxxxxx" behind the
# folder
_SOCKET_PATH = 107
_SOCKET_NAME = 36
_MAP = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, 4096)
assert memory[:5] == b"hello", memory[:5]
memory[:5] = b"there"
"""


def check_memory(request: DoctorRequest) -> list[Finding]:
    return [*_dev_shm(), _memfd(request), _temporary_folder(), _open_files(), *_locked_memory()]


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
    asked = next(
        (
            os.environ[variable]
            for variable in ("TMPDIR", "TEMP", "TMP")
            if os.environ.get(variable)
        ),
        None,
    )
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
    if len(os.fsencode(folder)) + _SOCKET_NAME > _SOCKET_PATH:
        advice = (
            f"Sockets have room for {_SOCKET_PATH - _SOCKET_NAME}: point TMPDIR to a shorter path, "
            "such as /tmp."
        )
        return broken(name, f"{folder} has {len(os.fsencode(folder))} letters", advice)
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


def _locked_memory() -> list[Finding]:
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [ok("locked memory", "unlimited")]
    advice = (
        "InfiniBand locks what it sends: `ulimit -l unlimited` (limits.conf: memlock; systemd: "
        "LimitMEMLOCK)."
    )
    return [broken("locked memory", f"limit {soft / _MIB:.3g} MiB, with InfiniBand", advice)]
