"""Where the ranks of an elastic job run: slot by slot, on this host or through the agents of
others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.launch.child import Child
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.mpirun import rank_environment
from lightning_ring.launch.remote import HostLine, RemoteChild, RemoteHosts
from lightning_ring.launch.supervisor import STOP_SIGNAL

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Place:
    host: Host
    node: int
    local_rank: int


class Slots:
    """The slots of ``hosts``, one host after the other. Whoever dies is replaced in its slot.

    ``ranks`` start. With ``grows`` the list of hosts may change later: a slot keeps its number,
    also where its host is listed no more, and new ones follow.

    Attributes:
        remote: The other hosts, if there are any, or may be.
        listens: The address at which the steward listens, and the one at which ranks of this host
            find it: those of several hosts meet at the addresses from which they connect to it.
    """

    def __init__(
        self,
        ranks: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        hosts: Sequence[Host],
        line: HostLine,
        *,
        grows: bool = False,
        start_seconds: float = 60.0,
    ) -> None:
        self._ranks = ranks
        self._command = command
        self._environ = environ
        self._places: list[_Place] = []
        self._listed: dict[str, Host] = {}
        self._nodes: list[str] = []
        several = grows or any(not host.is_local for host in hosts)
        self.remote = RemoteHosts(command, environ, line, start_seconds) if several else None
        addresses = reachable_candidates(environ) if several else []
        self.listens = ("", next(iter(addresses), _LOOPBACK)) if several else (_LOOPBACK, _LOOPBACK)
        self.list_hosts(list(hosts) or [Host("localhost", ranks)])

    def list_hosts(self, hosts: Sequence[Host]) -> list[int]:
        """These are the hosts from now on. Returns the slots that were not there a moment ago."""
        before = set(self.open_slots())
        self._listed = {host.name: host for host in hosts}
        for host in hosts:
            if host.name not in self._nodes:
                self._nodes.append(host.name)
                if self.remote is not None and not host.is_local:
                    self.remote.add(host)
            there = sum(place.host.name == host.name for place in self._places)
            node = self._nodes.index(host.name)
            self._places += [_Place(host, node, index) for index in range(there, host.slots)]
        return [slot for slot in self.open_slots() if slot not in before]

    def open_slots(self) -> list[int]:
        """Those of the hosts that are listed."""
        return [slot for slot in range(len(self._places)) if self.is_open(slot)]

    def is_open(self, slot: int) -> bool:
        place = self._places[slot]
        host = self._listed.get(place.host.name)
        return host is not None and place.local_rank < host.slots

    def child(self, slot: int, number: int, variables: Mapping[str, str]) -> Child | RemoteChild:
        """Process ``number``, which is to run in ``slot``, with ``variables`` by which it finds
        the steward.
        """
        place = self._places[slot]
        used = [other.node for other in self._places[: max(self._ranks, slot + 1)]]
        # numbers to go on with until the first view tells the rank
        numbers = {
            "RING_RANK": slot,
            "RING_WORLD_SIZE": max(self._ranks, slot + 1),
            "RING_LOCAL_RANK": place.local_rank,
            "RING_LOCAL_SIZE": used.count(place.node),
            "RING_NODE_RANK": place.node,
            "RING_NUM_NODES": max(used) + 1,
        }
        own = {name: str(value) for name, value in numbers.items()} | dict(variables)
        host, name = place.host, f"process {number}"
        if not host.is_local:
            assert self.remote is not None
            return RemoteChild(name, number, own, self.remote.hosts[host.name])
        environ = rank_environment(self._ranks, [host], self._environ, STOP_SIGNAL) | own
        return Child(name, self._command, environ)
