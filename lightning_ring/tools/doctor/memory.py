"""Memory and files that processes share, and how much of them this account may have."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from lightning_ring.tools.doctor.asking import ask
from lightning_ring.tools.doctor.finding import Finding, broken, ok, warning
from lightning_ring.tools.doctor.request import Request

_SHM = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_MIB = 2**20
_SHM_LEAST = 16 * _MIB  # two ranks' segments of Open MPI
_SHM_GOOD = 512 * _MIB  # batches in flight of a few data-loader workers
_TMP_LEAST = 64 * _MIB
_FILES_LEAST, _FILES_GOOD = 256, 1024
_SOCKET_PATH = (
    107  # bytes, Linux; Python's data-loader workers put "/pymp-xxxxxxxx/listener-xxxxxxxx" behind the folder
)
_SOCKET_NAME = 36
_MAP = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDWR)
memory = mmap.mmap(file, 4096)
assert memory[:5] == b"hello", memory[:5]
memory[:5] = b"there"
"""


def check(request: Request) -> list[Finding]:
    return [*_dev_shm(), _memfd(request), _temporary_folder(), _open_files(), *_locked_memory()]


def _dev_shm() -> list[Finding]:
    if not sys.platform.startswith("linux"):
        return []
    name = "/dev/shm"
    if not _SHM.is_dir() or not os.access(_SHM, os.W_OK | os.X_OK):
        return [broken(name, "missing, or not writable", f"mount -t tmpfs -o size=8g,mode=1777 tmpfs {_SHM}")]
    usage = shutil.disk_usage(_SHM)
    found = f"{usage.free / _MIB:,.0f} MiB free of {usage.total / _MIB:,.0f}"
    bigger = "a container needs --shm-size=8g (or --ipc=host), a host `mount -o remount,size=8g /dev/shm`"
    if usage.free < _SHM_LEAST:
        advice = "Remove what an ended job left (`ls -l /dev/shm`: sm_segment.*, torch_*, nccl-*), or enlarge it: "
        return [broken(name, found, f"MPI, NCCL and data-loader workers need it. {advice}{bigger}.")]
    if usage.free < _SHM_GOOD:
        return [warning(name, found, f"Data-loader workers may die of a bus error: {bigger}.")]
    return [ok(name, found)]


def _memfd(request: Request) -> Finding:
    """What ranks of one node do: one makes a file without a name, another maps it by its number and writes."""
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
                f"{otherwise} Ranks must see each other in /proc: one container, one user (in containers --pid=host)."
            )
            return warning(name, f"another process could not map it: {answer.last_error}", advice)
    except OSError as error:
        return warning(name, f"cannot be made: {error}", otherwise)
    finally:
        os.close(file)
    return ok(name, "made here, and written by another process")


def _temporary_folder() -> Finding:
    name = "temporary folder"
    asked = next((os.environ[variable] for variable in ("TMPDIR", "TEMP", "TMP") if os.environ.get(variable)), None)
    folder = asked or tempfile.gettempdir()
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        advice = "MPI and torch keep sockets and files there. Make it writable, or point TMPDIR to a folder that is."
        return broken(name, f"{folder} cannot be written: {error.strerror}", advice)
    free = shutil.disk_usage(folder).free
    if free < _TMP_LEAST:
        return broken(name, f"{folder} has {free / _MIB:.0f} MiB free", "Free some, or point TMPDIR elsewhere.")
    if len(os.fsencode(folder)) + _SOCKET_NAME > _SOCKET_PATH:
        advice = f"Sockets have room for {_SOCKET_PATH - _SOCKET_NAME}: point TMPDIR to a shorter path, such as /tmp."
        return broken(name, f"{folder} has {len(os.fsencode(folder))} letters", advice)
    return ok(name, f"{folder}, {free / _MIB:,.0f} MiB free")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = "unlimited" if soft == resource.RLIM_INFINITY else str(soft)
    if soft == resource.RLIM_INFINITY or soft >= _FILES_GOOD:
        return ok("open files", found)
    most = "65536" if hard == resource.RLIM_INFINITY else str(min(hard, 65536))
    more = (
        f"`ulimit -n {most}` before the job" if int(most) >= _FILES_GOOD else "ask for more (limits.conf: nofile 65536)"
    )
    advice = f"A rank has a connection to every other one, files for its data and pipes to its workers: {more}."
    return (broken if soft < _FILES_LEAST else warning)("open files", f"limit {found}", advice)


def _locked_memory() -> list[Finding]:
    if not _INFINIBAND.is_dir() or not any(_INFINIBAND.iterdir()):
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [ok("locked memory", "unlimited")]
    advice = "InfiniBand locks what it sends: `ulimit -l unlimited` (limits.conf: memlock; systemd: LimitMEMLOCK)."
    return [broken("locked memory", f"limit {soft / _MIB:.3g} MiB, with InfiniBand", advice)]
