"""Ends Gloo's waits from another thread: nothing in torch or Gloo does, `ProcessGroup.abort`
included.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_PAIR = struct.Struct("=q")
_NO_FLOW = bytes(4)
_SYN_SENT = "02"
_TABLES = {socket.AF_INET: Path("/proc/self/net/tcp"), socket.AF_INET6: Path("/proc/self/net/tcp6")}
_CONNECT_SECONDS = 1.0
_LOOK_SECONDS = 0.01


def shut_down_sockets(exchanged: Iterable[bytes]) -> None:
    """Shut down the connections to addresses that ranks have exchanged. Whoever waits on them has
    an error in 20 ms.

    ``exchanged`` are the values of the store in which the groups were opened. Gloo writes its
    listening addresses there as the kernel has them (``struct sockaddr``), and one end of each of
    its connections has such an address. So sockets of other libraries and of other threads are left
    alone. Linux; elsewhere nothing is found.
    """
    values = list(exchanged)
    for one in _sockets():
        with contextlib.suppress(OSError):
            ends = [
                _as_stored(one.family, address)
                for address in (one.getsockname(), one.getpeername())
            ]
            if any(_is_among(values, end) for end in ends):
                one.shutdown(socket.SHUT_RDWR)


def give_up_opening(
    exchanged: Sequence[bytes], num_ranks: int, is_opening: Callable[[], bool]
) -> None:
    """End the waits for connections that do not come up, while groups of ``num_ranks`` are being
    opened.

    Gloo waits for each connection five times as long as its timeout, also for a rank that has gone,
    or a host that does not answer. The first is given another connection, which ends at once, the
    second none. So the group may be there afterwards, and its first collective is an error. Returns
    when ``is_opening()`` does not hold any more.
    """
    for one in _sockets():
        with contextlib.suppress(OSError):
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and _is_among(list(exchanged), _as_stored(one.family, one.getsockname())):
                for pair in range(num_ranks):
                    _connect_for_a_peer(one, pair)
    while is_opening():
        _shut_down_unanswered(list(exchanged))
        time.sleep(_LOOK_SECONDS)


def _connect_for_a_peer(listener: socket.socket, pair: int) -> None:
    """Connect and hang up. The number that the listener has given this pair of ranks, from 0 on,
    comes first.
    """
    with socket.socket(listener.family) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(listener.getsockname())
        connection.sendall(_PAIR.pack(pair))


def _shut_down_unanswered(values: list[bytes]) -> None:
    """End this process's attempts to connect to exchanged addresses. Gloo tries each again,
    three times.
    """
    unanswered = _unanswered()
    for one in _sockets() if unanswered else ():
        address = unanswered.get(os.fstat(one.fileno()).st_ino)
        if address is not None and _is_among(values, address):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _unanswered() -> dict[int, bytes]:
    """By the number of the socket, the addresses, as stored, to which a connection is on its way
    (proc_pid_net(5)).
    """
    found: dict[int, bytes] = {}
    for family, table in _TABLES.items():
        with contextlib.suppress(OSError):
            for fields in map(str.split, table.read_text().splitlines()[1:]):
                if fields[3] == _SYN_SENT:
                    host, _, port = fields[2].partition(":")
                    # as they lie in memory
                    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                    packed = struct.pack(f"={len(words)}I", *words)
                    found[int(fields[9])] = _stored(family, int(port, 16), packed, _NO_FLOW)
    return found


def _sockets() -> Iterator[socket.socket]:
    """This process's sockets of the internet: copies, since the number of a descriptor may be
    given out again.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.family in _TABLES:
                            yield copy


def _as_stored(family: int, address: Any) -> bytes:
    """The beginning of the ``struct sockaddr`` of ``address``."""
    flow = _NO_FLOW if family == socket.AF_INET else struct.pack("!I", address[2])
    return _stored(family, address[1], socket.inet_pton(family, address[0].partition("%")[0]), flow)


def _stored(family: int, port: int, packed: bytes, flow: bytes) -> bytes:
    return (
        _FAMILY.pack(family)
        + _PORT.pack(port)
        + (b"" if family == socket.AF_INET else flow)
        + packed
    )


def _is_among(values: list[bytes], address: bytes) -> bool:
    return any(address in value for value in values)
