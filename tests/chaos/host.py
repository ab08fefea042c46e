"""What surrounds the processes of a planted job: hosts, mounts, a limit of memory. Takes Linux
and root.
"""

import contextlib
import ctypes
import os
import socket
import subprocess
from pathlib import Path

_NEW_NAMESPACE, _NEW_UTS, _NEW_NET = 0x00020000, 0x04000000, 0x40000000
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h
FILLER = "filler"  # a file's name
_SMALL_BYTES = 64 * 2**20
_LIMIT_BYTES = 64 * 2**20  # that a process may still take before the kernel kills it
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans():
    """Become the parent of what this process's children leave behind."""
    _check(_libc.prctl(_SUBREAPER, 1))


def own_mounts():
    """Let mounts from here on be seen by this process and its children alone. False where it
    must not make any.
    """
    if os.geteuid() != 0 or _libc.unshare(_NEW_NAMESPACE) != 0:
        return False
    subprocess.run(["mount", "--make-rslave", "/"], check=True)
    return True


@contextlib.contextmanager
def small_disk(folder, mib):
    """A file system of ``mib`` MiB in ``folder``."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def is_small(folder):
    """Whether ``folder`` is in a `small_disk`, so that it may be filled."""
    disk = os.statvfs(folder)
    return disk.f_blocks * disk.f_frsize <= _SMALL_BYTES


def fill(folder):
    """Leave no byte free in ``folder``."""
    assert is_small(folder)
    with contextlib.suppress(OSError), (folder / FILLER).open("ab", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def enter(host):
    """Be a process of ``host``, as ``ip netns exec`` and a shell of that host would start it."""
    with open(f"/run/netns/{host}") as namespace:
        _check(_libc.setns(namespace.fileno(), _NEW_NET))
    _check(_libc.unshare(_NEW_UTS | _NEW_NAMESPACE))
    socket.sethostname(host)
    subprocess.run(["mount", "--bind", f"/etc/netns/{host}/hosts", "/etc/hosts"], check=True)


def limit_memory():
    """Let this process take little more memory than it has. False where there are no cgroups to
    do it with.
    """
    try:
        group = _memory_group(os.getpid())
        group.mkdir()
        limit = next(
            group / name
            for name in ("memory.limit_in_bytes", "memory.max")
            if (group / name).exists()
        )
        limit.write_text(str(_LIMIT_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except (OSError, StopIteration):
        return False
    return True


def run_out_of_memory():
    """After `limit_memory`: the kernel kills this process."""
    taken = []
    while len(taken) < 2 * _LIMIT_BYTES // 2**20:
        taken.append(b"1" * 2**20)
    raise AssertionError(f"{len(taken)} MiB were taken with a limit of {_LIMIT_BYTES // 2**20} MiB")


def remove_groups():
    """Remove what `limit_memory` has made in processes that have ended. Groups with processes
    stay.
    """
    for group in _memory_group(0).parent.glob("chaos-*"):
        with contextlib.suppress(OSError):
            group.rmdir()


def _memory_group(pid):
    # of the two versions of cgroups
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    return (first if first.is_dir() else second) / f"chaos-{pid}"


def _check(result):
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
