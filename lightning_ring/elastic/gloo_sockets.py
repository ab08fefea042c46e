"""Ends Gloo's waits from another thread: nothing in torch or Gloo does, `ProcessGroup.abort` included."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterable
from typing import Any

_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")


def shut_down_sockets(exchanged: Iterable[bytes]) -> None:
    """Shut down the connections to addresses that ranks have exchanged. Whoever waits on them has an error in 20 ms.

    ``exchanged`` are the values of the store in which the groups were opened. Gloo writes its listening addresses there
    as the kernel has them (``struct sockaddr``), and one end of each of its connections has such an address. So sockets
    of other libraries and of other threads are left alone. Linux; elsewhere nothing is found.
    """
    values = list(exchanged)
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                _shut_down_if_exchanged(int(name), values)


def _shut_down_if_exchanged(descriptor: int, values: list[bytes]) -> None:
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        return
    with socket.socket(fileno=os.dup(descriptor)) as copy:  # asked of the copy: the number may be given out again
        if copy.family not in (socket.AF_INET, socket.AF_INET6):
            return
        ends = [_as_stored(copy.family, address) for address in (copy.getsockname(), copy.getpeername())]
        if any(end in value for end in ends for value in values):
            copy.shutdown(socket.SHUT_RDWR)


def _as_stored(family: int, address: Any) -> bytes:
    """The beginning of the ``struct sockaddr`` of ``address``."""
    head = _FAMILY.pack(family) + _PORT.pack(address[1])
    flow = b"" if family == socket.AF_INET else struct.pack("!I", address[2])
    return head + flow + socket.inet_pton(family, address[0].partition("%")[0])
