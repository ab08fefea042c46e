"""Memory that the processes of one node share: files without a name, so that nothing can stay
behind in /dev/shm.

Each rank makes a file of its own with memfd_create; the others open it as ``/proc/PID/fd/N`` and
map it. It ends with the last process or tensor that uses it, however that process ends, and the
size of /dev/shm does not limit it.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
from typing import Any, Protocol

from lightning_ring.comm.calls import by_rank

_PREFIX = "lightning_ring"


class Bootstrap(Protocol):
    """What ranks need to meet: every `Communicator` over just them will do, and
    `StoreBootstrap`.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...


class NoSharedMemory(Exception):
    """Some rank could not make or map the memory. The text is the same on every rank."""


def share(bootstrap: Bootstrap, num_bytes: int) -> list[mmap.mmap]:
    """Every rank's new memory of ``num_bytes``, by rank, mapped and its pages reserved.
    Collective.
    """
    return share_named(bootstrap, num_bytes)[1]


def share_named(bootstrap: Bootstrap, num_bytes: int) -> tuple[str, list[mmap.mmap]]:
    """As `share`, with a name of the memory that is the same on every rank, and that no other
    memory has.
    """
    file, offer = _make(num_bytes)
    try:
        offers = bootstrap.all_gather_object(offer)
        _raise_if_any([offer.get("error", "") for offer in offers])
        maps, error = list[mmap.mmap](), ""
        try:
            maps = [_map(offer["path"], offer["name"], num_bytes) for offer in offers]
        except (OSError, ValueError) as problem:
            error = f"opening another rank's memory failed: {problem}"
        # until here the others need this process's descriptor
        _raise_if_any(bootstrap.all_gather_object(error))
        return offers[0]["name"], maps
    finally:
        if file is not None:
            os.close(file)


def _make(num_bytes: int) -> tuple[int | None, dict[str, Any]]:
    """A new file, and where other processes find it or why there is none."""
    if platform.machine() not in ("x86_64", "AMD64"):
        # elsewhere a flag may overtake the data written before it, and Python has no fence to keep
        # it from that
        return None, {"error": f"it is used on x86-64 only, and this is {platform.machine()}"}
    if not hasattr(os, "memfd_create"):
        return None, {"error": "this system has no memfd_create (Linux has)"}
    name = f"{_PREFIX}-{secrets.token_hex(8)}"
    file = None
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        # an error now, where a missing page later would be a SIGBUS
        os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if file is not None:
            os.close(file)
        return None, {"error": f"reserving {num_bytes / 2**20:.3g} MiB failed: {error}"}
    return file, {"path": f"/proc/{os.getpid()}/fd/{file}", "name": name}


def _map(path: str, name: str, num_bytes: int) -> mmap.mmap:
    target = os.readlink(path)
    if name not in target:  # in another PID namespace the number is another process's
        raise ValueError(
            f"{path} is {target} here, not {name}; the ranks live in containers with "
            "separate processes"
        )
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(file, num_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    finally:
        os.close(file)


def _raise_if_any(errors: list[str]) -> None:
    if any(errors):
        raise NoSharedMemory(by_rank([error or "no error" for error in errors]))
