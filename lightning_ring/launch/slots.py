"""Where the ranks of an elastic job run: slot by slot, on this host or through the agents of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.child import Child
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.mpirun import rank_environment
from lightning_ring.launch.remote import HostLine, RemoteChild, RemoteHosts
from lightning_ring.launch.supervisor import STOP_SIGNAL

_LOOPBACK = "127.0.0.1"


class Slots:
    """``ranks`` slots, which fill one of ``hosts`` after the other. Whoever dies is replaced in its slot.

    Attributes:
        remote: The other hosts, if there are any.
        listens: The address at which the steward listens, and the one at which ranks of this host find it: those of
            several hosts meet at the addresses from which they connect to it.
    """

    def __init__(
        self, ranks: int, command: Sequence[str], environ: Mapping[str, str], hosts: Sequence[Host], line: HostLine
    ) -> None:
        self._ranks = ranks
        self._command = command
        self._environ = environ
        self._hosts = list(hosts) or [Host("localhost", ranks)]
        others = [host for host in self._hosts if not host.is_local]
        self.remote = RemoteHosts(others, command, environ, line) if others else None
        addresses = reachable_candidates(environ) if others else []
        self.listens = ("", next(iter(addresses), _LOOPBACK)) if others else (_LOOPBACK, _LOOPBACK)

    def child(self, slot: int, number: int, variables: Mapping[str, str]) -> Child | RemoteChild:
        """Process ``number``, which is to run in ``slot``, with ``variables`` by which it finds the steward."""
        places = [(node, index) for node, host in enumerate(self._hosts) for index in range(host.slots)]
        used = [node for node, _ in places[: self._ranks]]
        node, local_rank = places[slot]
        # numbers to go on with until the first view tells the rank
        numbers = {
            "RING_RANK": slot,
            "RING_WORLD_SIZE": self._ranks,
            "RING_LOCAL_RANK": local_rank,
            "RING_LOCAL_SIZE": used.count(node),
            "RING_NODE_RANK": node,
            "RING_NUM_NODES": len(set(used)),
        }
        own = {name: str(value) for name, value in numbers.items()} | dict(variables)
        host, name = self._hosts[node], f"process {number}"
        if not host.is_local:
            assert self.remote is not None
            return RemoteChild(name, number, own, self.remote.hosts[host.name])
        return Child(name, self._command, rank_environment(self._ranks, [host], self._environ, STOP_SIGNAL) | own)
