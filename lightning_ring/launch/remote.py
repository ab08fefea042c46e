"""Ranks on other hosts, as the process that supervises them sees them. An `agent` starts and
watches them there.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from secrets import token_hex

from lightning_ring.elastic.membership import counted_ranks
from lightning_ring.job.exit import say
from lightning_ring.job.launchers import tasks_per_node
from lightning_ring.job.rendezvous.door import SECRET, Door
from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.job.watch.messages import Message
from lightning_ring.launch.agent import ALIVE_SECONDS, DOOR, Order
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.mpirun import exported_names

LOST_SECONDS = 1.4  # without a sign of life, after which a host's ranks count as dead
_END_SECONDS = 5.0

HostLine = Callable[[Host, str], list[str]]
"""The line that runs a shell command on a host, standard input passed on."""


def ssh_line(host: Host, command: str) -> list[str]:
    """Through ``ssh``, or what RING_SSH says (``ssh -p 2222``)."""
    return [*shlex.split(os.environ.get("RING_SSH", "ssh -o BatchMode=yes")), host.name, command]


def srun_line(host: Host, command: str) -> list[str]:
    """As a step of this Slurm job, beside its other steps, with all cores of the node."""
    cores = max(tasks_per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")), default=1)
    step = f"srun --overlap --nodes=1 --ntasks=1 --nodelist={host.name} --cpus-per-task={cores}"
    step += " --cpu-bind=none --mpi=none --kill-on-bad-exit=0 sh -c"
    return [*step.split(), command]


@dataclass(eq=False)
class RemoteChild:
    """A process that an agent starts for the `Supervisor`."""

    name: str
    number: int
    environ: Mapping[str, str]
    host: RemoteHost
    pid: int = 0
    program: int | None = None
    dead: bool = False
    early_failure: int | None = None  # its exit code, as long as the kernel has not told its parent
    code: int | None = None
    is_lost: bool = False  # with its host
    idle_seconds: float = 0.0
    idle_since: float = 0.0
    _started: bool = False

    def start(self, **variables: str) -> None:
        self._started = True
        self.host.start(self)

    @property
    def is_started(self) -> bool:
        return self.pid > 0 or self.code is not None

    @property
    def is_running(self) -> bool:
        return self._started and self.code is None

    def poll(self) -> int | None:
        return self.code

    def identify(self, pid: int) -> None:
        self.host.send({"kind": "identify", "number": self.number, "pid": pid})

    def is_dead(self) -> bool:
        return self.dead

    def failure(self) -> int | None:
        return self.code or self.early_failure

    def idle(self, now: float) -> float:
        return self.idle_seconds + now - self.idle_since if self.pid else 0.0

    def send_signal(self, signum: int) -> None:
        self.host.send({"kind": "signal", "number": self.number, "signal": int(signum)})

    def session(self) -> Sequence[int]:
        return [self.pid] if self.is_running else []

    def kill_session(self) -> None:
        if self.is_started or self.host.is_connected:
            self.host.send({"kind": "kill", "number": self.number})
        else:
            self.host.forget(self)
            self.dead, self.code = True, -signal.SIGKILL


@dataclass(eq=False)
class RemoteHost:
    """One other host. Its agent is started with its first process, and again after it was lost."""

    host: Host
    order: Callable[[Host, int], Order]
    door: Door
    line: HostLine
    start_seconds: float  # for ssh and Python there
    children: dict[int, RemoteChild] = field(default_factory=dict)
    starts: int = 0  # of agents, of which the last one is let in
    is_connected: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _heard: float = 0.0
    _has_spoken: bool = False  # since the last look
    _unsent: list[Message] = field(default_factory=list)

    def start(self, child: RemoteChild) -> None:
        self.children[child.number] = child
        if self._process is None:
            self._start_agent()
        # The agent has the secret from its order, which ssh encrypts; this connection does not.
        environ = {name: text for name, text in child.environ.items() if name != SECRET}
        self.send({"kind": "start", "number": child.number, "environ": environ})

    def send(self, message: Message) -> None:
        if self.is_connected:
            self.door.send(message, self.host.name)
        elif self._process is not None:
            self._unsent.append(message)

    def forget(self, child: RemoteChild) -> None:
        """The agent, which has not connected yet, is not to start ``child``."""
        del self.children[child.number]
        self._unsent = [one for one in self._unsent if one.get("number") != child.number]

    def admits(self, start: int) -> bool:
        """Whether the agent of this ``start`` is expected."""
        return self._process is not None and not self.is_connected and start == self.starts

    def take(self, message: Message) -> None:
        self._has_spoken = True
        if message["kind"] == "hello":
            self.is_connected = True
            unsent, self._unsent = self._unsent, []
            for one in unsent:
                self.send(one)
        elif message["kind"] == "alive":
            now = time.monotonic()
            for number, seconds in message["idle"].items():
                if (child := self.children.get(int(number))) is not None:
                    child.idle_seconds, child.idle_since = seconds, now
        elif (child := self.children.get(message.get("number", -1))) is not None:
            if message["kind"] == "pid":
                child.pid, child.idle_since = message["pid"], time.monotonic()
            elif message["kind"] == "dead":
                child.dead, child.early_failure = True, message["failure"]
            elif message["kind"] == "ended":
                child.dead, child.code = True, message["code"]

    def hung_up(self) -> None:
        self._lose("the connection to its agent ended")

    def look(self, now: float, gap: float) -> None:
        """Find out whether the host is lost. ``gap``: time in which this process did not look."""
        if self._process is None:
            return
        if not self.is_connected:
            if (code := self._process.poll()) is not None:
                line = shlex.join(self.line(self.host, "..."))
                self._lose(f"`{line}` ended with exit code {code}", code or 1)
            elif now - self._started > self.start_seconds:
                limit = f"{self.start_seconds:g} s (--start-timeout)"
                self._lose(f"its agent was not up within {limit}", 1)
            return
        self._heard = now if self._has_spoken else self._heard + gap
        self._has_spoken = False
        if now - self._heard > LOST_SECONDS:
            self._lose(
                f"its agent has said nothing for {now - self._heard:.1f} s: the host or "
                "the way to it is gone"
            )

    def ask_to_end(self) -> None:
        """The agent ends its ranks and itself. One that has not connected yet finds nobody, and
        ends too.
        """
        if self.is_connected:
            self.send({"kind": "end"})
        elif self._process is not None:
            self._process.kill()

    def close(self, until: float) -> None:
        """Wait until the agent has ended, up to the monotonic clock's ``until``, after
        `ask_to_end`.
        """
        if self._process is not None:
            try:
                self._process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _start_agent(self) -> None:
        self.starts += 1
        names = {name: os.environ[name] for name in ("PYTHONPATH", "PATH") if name in os.environ}
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in names.items())
        command = (
            f"exec env {variables} {shlex.quote(sys.executable)} -m lightning_ring.launch.agent"
        )
        self._started = time.monotonic()
        # no window that asks for a password
        environ = {**os.environ, "SSH_ASKPASS_REQUIRE": "never"}
        # a file: ssh reads a pipe once it is connected, and an order that does not fit into it
        # would block this process
        with tempfile.TemporaryFile() as order:
            order.write(self.order(self.host, self.starts).as_line().encode())
            order.seek(0)
            line = self.line(self.host, command)
            try:
                self._process = subprocess.Popen(
                    line, stdin=order, start_new_session=True, env=environ
                )
            except OSError as error:
                self._lose(f"`{line[0]}` could not be run: {error.strerror}", 127)

    def _lose(self, why: str, code: int = -9) -> None:
        """Its ranks are dead: their agent kills them within the same time, and with them go its
        connections.
        """
        left = [child for child in self.children.values() if child.code is None]
        if left:
            say(f"host {self.host.name} is lost with {counted_ranks(len(left))}: {why}")
        self.door.hang_up(self.host.name)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.is_connected, self._process, self._unsent = False, None, []
        for child in left:
            child.dead, child.code, child.is_lost = True, code, True


class RemoteHosts:
    """The hosts whose agents connect to this process."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        line: HostLine,
        start_seconds: float = 60.0,
    ) -> None:
        self._command, self._environ = list(command), environ
        self._line, self._start_seconds = line, start_seconds
        self.secret = token_hex(16)
        self._door = Door(socket.create_server(("", 0), backlog=1024), self.secret, DOOR, self)
        self._next_alive = 0.0
        self._last_look = time.monotonic()
        self.steward_port = 0
        self.hosts: dict[str, RemoteHost] = {}

    def add(self, host: Host) -> None:
        self.hosts[host.name] = RemoteHost(
            host, self._order, self._door, self._line, self._start_seconds
        )
        self._door.expected = len(self.hosts)

    def look(self, now: float) -> None:
        """Serve all agents. Called again and again."""
        gap = max(0.0, now - self._last_look - ALIVE_SECONDS)  # this process itself was held up
        self._last_look = now
        self._door.serve(0)
        for host in self.hosts.values():
            host.look(now, gap)
        if now >= self._next_alive:
            self._next_alive = now + ALIVE_SECONDS
            for host in self.hosts.values():
                if host.is_connected:
                    host.send({"kind": "alive"})

    def close(self) -> None:
        for host in self.hosts.values():
            host.ask_to_end()
        until = time.monotonic() + _END_SECONDS
        for host in self.hosts.values():
            host.close(until)
        self._door.close()

    # -- called by the door

    def admit(self, hello: Message) -> tuple[str, Message]:
        name: str = hello["host"]
        if name not in self.hosts or not self.hosts[name].admits(hello["start"]):
            raise PermissionError(f"no agent of host {name} is expected")
        return name, {}

    def take(self, name: str, message: Message) -> None:
        self.hosts[name].take(message)

    def hung_up(self, name: str, why: str) -> None:
        self.hosts[name].hung_up()

    def _order(self, host: Host, start: int) -> Order:
        exported = {name: self._environ[name] for name in exported_names(self._environ)}
        addresses = reachable_candidates(self._environ)
        cwd = os.getcwd()
        return Order(
            host.name,
            start,
            self.secret,
            addresses,
            self._door.port,
            self.steward_port,
            self._command,
            cwd,
            host.slots,
            self._start_seconds,
            exported,
        )
