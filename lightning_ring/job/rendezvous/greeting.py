"""Ranks find rank 0's store by a greeting: one line over TCP, with a token that only the job knows.

torch's ``TCPStore`` waits for ever, whatever its timeout, for a server that accepts a connection
and then says nothing, as any other program does on a port that was taken. A greeting, all of whose
waits are bounded, comes first.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from typing import Any

from lightning_ring.errors import RankDiscoveryError

LOOPBACK = "127.0.0.1"
ANSWER_SECONDS = 5.0  # a server that accepted has to send its line within this time


def reserve_port(address: str = LOOPBACK) -> socket.socket:
    """A socket bound to a port of ``address`` that the system gives to no other program until the
    socket is closed.

    A program that asks for this port by its number, with SO_REUSEADDR as `listen` and torch's store
    do, may listen there meanwhile: the socket here never listens.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def listening_address(num_nodes: int, address: str = LOOPBACK) -> str:
    """Where rank 0 listens for ranks that come to ``address``; empty for all interfaces.

    Several nodes may reach rank 0's host through any interface. Ranks of one node need no interface
    but loopback, where nobody else comes, unless the user named an ``address`` that all ranks know
    beforehand (MASTER_ADDR).
    """
    return address if num_nodes == 1 else ""


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket on ``address``, an address or a name; empty for all interfaces, of IPv4
    and IPv6.

    Port 0 lets the system choose one that is free.
    """
    try:
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        where: Any = (address, port)
        if address:
            family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        # sets SO_REUSEADDR: a job that just ended leaves its port in TIME_WAIT; only a live
        # listener is in the way
        return socket.create_server(where, family=family, backlog=1024, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            raise RankDiscoveryError(
                f"MASTER_ADDR={address} is no address of rank 0's host, where all ranks of this "
                "job run. Set MASTER_ADDR=localhost, or start the ranks with mpirun, torchrun or "
                "ringrun, which need none."
            ) from error
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RankDiscoveryError(
            f"Rank 0 cannot listen on port {port} of {address or 'this host'}: {reason}. Another "
            "program, or a job that is still ending, may have taken it: choose another "
            "MASTER_PORT, or start the ranks with mpirun or ringrun, which need none."
        ) from error


class Greeter:
    """A thread in rank 0 that sends each of ``count`` callers of `greet` one word, such as the
    store's port.
    """

    def __init__(self, listener: socket.socket, token: str, count: int, word: str) -> None:
        self._listener = listener
        self._missing = set(range(1, count + 1))
        self._answer = f"lightning_ring {token} {word}\n".encode()
        threading.Thread(target=self._serve, name="ring-greeter", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            # wakes the thread, which a close alone does not
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while self._missing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection, contextlib.suppress(OSError, ValueError):
                connection.settimeout(ANSWER_SECONDS)
                rank = int(_read_line(connection))
                connection.sendall(self._answer)
                self._missing.discard(rank)
        self._listener.close()


def greet(
    address: str,
    port: int,
    token: str,
    rank: int,
    timeout: float,
    *,
    listening: bool = False,
    answer_seconds: float = ANSWER_SECONDS,
) -> tuple[str, str]:
    """Ask the `Greeter` at ``address``; its word, and this host's address on the way there.

    With ``listening`` the greeter is known to be up, so that a refusal is an answer; without, it
    may still start. A server that accepts and sends nothing for ``answer_seconds`` is another
    program.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection(
                (address, port), timeout=max(0.1, deadline - time.monotonic())
            ) as connection:
                connection.settimeout(answer_seconds)
                own_address = connection.getsockname()[0]
                answer = ""
                with contextlib.suppress(TimeoutError):  # then it is another program
                    connection.sendall(f"{rank}\n".encode())
                    answer = _read_line(connection)
        except OSError as error:  # not listening yet, or its host is still starting
            if listening or time.monotonic() > deadline:
                raise RankDiscoveryError(
                    f"Rank {rank} could not reach rank 0 at {address}:{port} within {timeout:.0f} "
                    f"s ({error}). Rank 0 may have failed to start, or a firewall, or a wrong "
                    "MASTER_ADDR, lies between."
                ) from error
            time.sleep(0.1)
            continue
        words = answer.split()
        if len(words) == 3 and words[:2] == ["lightning_ring", token]:
            return words[2], own_address
        raise RankDiscoveryError(
            f"Rank {rank} asked {address}:{port} for rank 0 of its job and another program "
            f"answered ({answer[:60]!r}): the port is taken. Choose another MASTER_PORT, or start "
            "the ranks with mpirun or ringrun, which need none."
        )


def _read_line(connection: socket.socket) -> str:
    with connection.makefile("rb") as file:
        return file.readline(4096).decode(errors="replace").strip()
