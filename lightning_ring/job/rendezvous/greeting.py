"""Ranks find rank 0's store by a greeting at a `Door`.

torch's ``TCPStore`` waits for ever, whatever its timeout, for a server that accepts a connection
and says nothing, as another program on its port does. All waits of a greeting are bounded.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.rendezvous.door import BACKLOG, Door, NotOurDoor, knock
from lightning_ring.job.watch.messages import Message

LOOPBACK = "127.0.0.1"
_DOOR = "rendezvous"
_ANSWER_SECONDS = 30.0  # rank 0 may be in C code, or load libraries


def reserve_port(address: str = LOOPBACK) -> socket.socket:
    """A socket bound to a port of ``address`` that the system gives to no other program until the
    socket is closed.

    Its socket never listens, so torch's store and `listen` can take the port with SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((address, 0))
    return reserved


def listen(address: str, port: int = 0) -> socket.socket:
    """A listening socket on ``address``; empty for all interfaces, of IPv4 and IPv6. Port 0 lets
    the system choose.
    """
    try:
        both = not address and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        where: Any = (address, port)
        if address:
            family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        # Sets SO_REUSEADDR: a job that just ended leaves its port in TIME_WAIT.
        return socket.create_server(where, family=family, backlog=BACKLOG, dualstack_ipv6=both)
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
    """A thread in rank 0 that tells ``count`` callers of `greet` one word, such as the store's
    port.
    """

    def __init__(self, listener: socket.socket, secret: str, count: int, word: str) -> None:
        self._missing = set(range(1, count + 1))
        self._word = word
        self.door = Door(listener, secret, _DOOR, self, count)
        self.door.serve_in_thread("ring-greeter", lambda: not self._missing)

    # -- called by the door

    def admit(self, hello: Message) -> tuple[str, Message]:
        if type(hello["rank"]) is not int:
            raise TypeError("a rank is a number")
        return hello["nonce"], {"word": self._word}

    def take(self, caller: str, hello: Message) -> None:
        self._missing.discard(hello["rank"])

    def hung_up(self, caller: str, why: str) -> None:
        pass


def greet(
    address: str,
    port: int,
    secret: str,
    rank: int,
    timeout: float,
    *,
    once: bool = False,
) -> tuple[str, str]:
    """Ask the `Greeter` at ``address``; its word, and this host's address on the way there.

    ``once`` is that of `knock`.
    """
    try:
        connection, welcome = knock(
            [address],
            port,
            secret,
            _DOOR,
            {"rank": rank},
            timeout,
            once=once,
            answer_seconds=min(timeout, _ANSWER_SECONDS),
        )
    except NotOurDoor as error:
        raise RankDiscoveryError(
            f"Rank {rank} asked {address}:{port} for rank 0 of its job ({error}): the port is "
            "taken. Choose another MASTER_PORT, or start the ranks with mpirun or ringrun, which "
            "need none."
        ) from error
    except OSError as error:
        raise RankDiscoveryError(
            f"Rank {rank} could not reach rank 0 at {address}:{port} within {timeout:.0f} s "
            f"({error}). Rank 0 may have failed to start, or a firewall, or a wrong MASTER_ADDR, "
            "lies between."
        ) from error
    own_address = connection.socket.getsockname()[0]
    connection.close()
    return welcome["word"], own_address
