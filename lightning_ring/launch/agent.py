"""The agent of one host: starts ranks there for a steward on another host, watches them, and ends
them with itself.

``python -m lightning_ring.launch.agent`` reads an `Order` from standard input and connects to its
sender (`remote`). Each side shows four times a second that it lives. An agent that hears nothing
for `AGENT_SECONDS` kills its ranks, before the steward counts them as dead (`remote.LOST_SECONDS`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.exit import say
from lightning_ring.job.rendezvous.door import SECRET, knock
from lightning_ring.job.watch.messages import Message, MessageConnection
from lightning_ring.launch.child import Child
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.mpirun import rank_environment
from lightning_ring.launch.orphan_guard import OrphanGuard
from lightning_ring.launch.supervisor import STOP_SIGNAL

ALIVE_SECONDS = 0.25
AGENT_SECONDS = 1.0
_LOOK_SECONDS = 0.01
DOOR = "agents"


@dataclass(frozen=True, slots=True)
class Order:
    """What an agent is to do. One of ``addresses`` leads to the steward's host.

    Another program may answer at the others, so both sides prove that they know ``secret``.
    ``start`` counts the agents of this host; the last one is let in.
    """

    host: str
    start: int
    secret: str
    addresses: Sequence[str]
    port: int
    steward_port: int
    command: Sequence[str]
    cwd: str
    ranks: int  # on this host, at the same time
    start_seconds: float
    environ: Mapping[str, str] = field(default_factory=dict)

    def as_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


class Agent:
    def __init__(self, order: Order) -> None:
        self._order = order
        self._children: dict[int, Child] = {}
        self._told: dict[int, str] = {}  # what the steward knows of each
        self._connection = self._connect()
        self._guard = OrphanGuard(
            f"the agent of {order.host} (pid {os.getpid()}) has gone: its ranks end"
        )
        self._over = False

    def run(self) -> int:
        """Serve until the job ends (0) or the steward is lost (1)."""
        heard = last_look = time.monotonic()
        next_alive = 0.0
        while not self._over:
            self._connection.wait(_LOOK_SECONDS)
            messages, over = self._connection.receive()
            for message in messages:
                self._take(message)
            now = time.monotonic()
            if now - last_look > ALIVE_SECONDS:  # this process itself was held up
                heard += now - last_look
            last_look = now
            heard = now if messages else heard
            if over is not None or now - heard > AGENT_SECONDS:
                break
            for number, child in list(self._children.items()):
                self._look_at(number, child)
            if now >= next_alive:
                next_alive = now + ALIVE_SECONDS
                idle = {number: child.idle(now) for number, child in self._children.items()}
                self._connection.send({"kind": "alive", "idle": idle})
        for child in self._children.values():
            child.kill_session()
        self._guard.close()
        return 0 if self._over else 1

    def _connect(self) -> MessageConnection:
        order = self._order
        hello = {"host": order.host, "start": order.start}
        where = order.addresses, order.port, order.secret
        try:
            connection, _ = knock(*where, DOOR, hello, order.start_seconds)
        except OSError as error:
            raise RankDiscoveryError(
                f"The agent of {order.host} could not reach port {order.port} of the host that "
                f"started it within {order.start_seconds:g} s ({error}). Open the hosts' firewalls "
                "for each other."
            ) from error
        self._address = connection.socket.getpeername()[0]
        return connection

    def _take(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "start":
            self._start(message["number"], message["environ"])
        elif kind == "end":
            self._over = True
        elif (child := self._children.get(message.get("number", -1))) is not None:
            if kind == "signal":
                child.send_signal(message["signal"])
            elif kind == "identify":
                child.identify(message["pid"])
            elif kind == "kill":
                child.kill_session()

    def _start(self, number: int, variables: dict[str, str]) -> None:
        order = self._order
        here = [Host(order.host, order.ranks)]
        environ = rank_environment(order.ranks, here, {**os.environ, **order.environ}, STOP_SIGNAL)
        environ |= variables | {SECRET: order.secret}
        environ["RING_STEWARD"] = f"{self._address}:{order.steward_port}"
        child = Child(f"process {number}", order.command, environ)
        try:
            child.start(order.cwd)
        except OSError as error:
            say(f"{order.host}: {error}")
            self._connection.send({"kind": "ended", "number": number, "code": 127})
            return
        self._children[number] = child
        self._guard.watch(child.pid)
        self._connection.send({"kind": "pid", "number": number, "pid": child.pid})

    def _look_at(self, number: int, child: Child) -> None:
        if self._told.get(number) is None and child.is_dead():
            self._told[number] = "dead"
            self._connection.send({"kind": "dead", "number": number, "failure": child.failure()})
        if (code := child.poll()) is not None and self._told.get(number) != "ended":
            self._told[number] = "ended"
            self._connection.send({"kind": "ended", "number": number, "code": code})
        if self._told.get(number) == "ended" and not child.session():
            self._guard.forget(child.pid)
            del self._children[number]


def main() -> int:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # When a Slurm job is cancelled the steward decides. SIG_IGN would be inherited.
        signal.signal(signum, lambda number, frame: None)
    line = sys.stdin.readline()
    # The sender has gone, or standard input is not passed on.
    if not line.endswith("\n"):
        say("an agent was started without an order on its standard input")
        return 1
    try:
        return Agent(Order(**json.loads(line))).run()
    except RankDiscoveryError as error:
        say(str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
