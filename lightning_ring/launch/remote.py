"""Ranks on other hosts, as the process that supervises them sees them. An `agent` starts and
watches them there.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_ring.job.exit import say
from lightning_ring.job.launchers import tasks_per_node
from lightning_ring.job.rendezvous.interfaces import reachable_candidates
from lightning_ring.job.watch.messages import LONGEST_LINE, Message, MessageConnection, is_token
from lightning_ring.launch.agent import ALIVE_SECONDS, Order
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.mpirun import exported_names

LOST_SECONDS = 1.4  # without a sign of life, after which a host's ranks count as dead
_END_SECONDS = 5.0
_HELLO_SECONDS = 10.0  # in which a connection has to say whose agent it is
_HELLO_BYTES = 4096
_MOST_STRANGERS = 64

HostLine = Callable[[Host, str], list[str]]
"""The line that runs a shell command on a host, standard input passed on."""


def ssh_line(host: Host, command: str) -> list[str]:
    """Through ``ssh``, or what RING_SSH says (``ssh -p 2222``)."""
    return [*shlex.split(os.environ.get("RING_SSH", "ssh -o BatchMode=yes")), host.name, command]


def srun_line(host: Host, command: str) -> list[str]:
    """As a step of this Slurm job, beside its other steps, with all cores of the node."""
    cores = max(tasks_per_node(os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")), default=1)
    step = [
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host.name}",
        f"--cpus-per-task={cores}",
    ]
    return [
        "srun",
        *step,
        "--cpu-bind=none",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        "sh",
        "-c",
        command,
    ]


@dataclass(eq=False)
class RemoteChild:
    """A process that an agent starts (`supervisor.Supervised`)."""

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

    def start(self, cwd: str | None, **variables: str) -> None:
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
        self.host.send({"kind": "kill", "number": self.number})


@dataclass(eq=False)
class RemoteHost:
    """One other host. Its agent is started with its first process, and again after it was lost."""

    host: Host
    order: Callable[[Host, str, str], Order]
    line: HostLine
    start_seconds: float  # for ssh and Python there
    children: dict[int, RemoteChild] = field(default_factory=dict)
    token: str = ""  # that its agent shows; "" while none is expected
    answer: str = ""  # that its agent expects
    connection: MessageConnection | None = None
    _process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _heard: float = 0.0
    _unsent: list[Message] = field(default_factory=list)

    def start(self, child: RemoteChild) -> None:
        self.children[child.number] = child
        if self._process is None:
            self._start_agent()
        self.send({"kind": "start", "number": child.number, "environ": dict(child.environ)})

    def send(self, message: Message) -> None:
        if self.connection is not None:
            self.connection.send(message)
        elif self._process is not None:
            self._unsent.append(message)

    def connected(self, connection: MessageConnection, now: float) -> None:
        self.connection, self._heard = connection, now
        connection.send({"kind": "welcome", "answer": self.answer})
        unsent, self._unsent = self._unsent, []
        for message in unsent:
            connection.send(message)

    def look(self, now: float, gap: float) -> None:
        """Take what has arrived. ``gap``: time in which this process did not look."""
        if self._process is None:
            return
        if self.connection is None:
            if (code := self._process.poll()) is not None:
                self._lose(
                    f"`{shlex.join(self.line(self.host, '...'))}` ended with exit code {code}",
                    code or 1,
                )
            elif now - self._started > self.start_seconds:
                self._lose(
                    f"its agent was not up within {self.start_seconds:g} s (--start-timeout)", 1
                )
            return
        messages, over = self.connection.receive()
        self._heard = now if messages else self._heard + gap
        for message in messages:
            self._take(message, now)
        if over is not None:
            self._lose("the connection to its agent ended")
        elif now - self._heard > LOST_SECONDS:
            self._lose(
                f"its agent has said nothing for {now - self._heard:.1f} s: the host or "
                "the way to it is gone"
            )

    def ask_to_end(self) -> None:
        """The agent ends its ranks and itself. One that has not connected yet finds nobody, and
        ends too.
        """
        if self.connection is not None:
            self.connection.send({"kind": "end"})
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
        if self.connection is not None:
            self.connection.close()

    def _start_agent(self) -> None:
        self.token, self.answer = secrets.token_hex(16), secrets.token_hex(16)
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
            order.write(self.order(self.host, self.token, self.answer).as_line().encode())
            order.seek(0)
            line = self.line(self.host, command)
            try:
                self._process = subprocess.Popen(
                    line, stdin=order, start_new_session=True, env=environ
                )
            except OSError as error:
                self._lose(f"`{line[0]}` could not be run: {error.strerror}", 127)

    def _take(self, message: Message, now: float) -> None:
        if message["kind"] == "alive":
            for number, seconds in message["idle"].items():
                if (child := self.children.get(int(number))) is not None:
                    child.idle_seconds, child.idle_since = seconds, now
            return
        child = self.children.get(message.get("number", -1))
        if child is None:
            return
        if message["kind"] == "pid":
            child.pid, child.idle_since = message["pid"], now
        elif message["kind"] == "dead":
            child.dead, child.early_failure = True, message["failure"]
        elif message["kind"] == "ended":
            child.dead, child.code = True, message["code"]

    def _lose(self, why: str, code: int = -9) -> None:
        """Its ranks are dead: their agent kills them within the same time, and with them go its
        connections.
        """
        left = [child for child in self.children.values() if child.code is None]
        if left:
            say(f"host {self.host.name} is lost with {len(left)} ranks: {why}")
        if self.connection is not None:
            self.connection.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.connection, self._process, self._unsent, self.token = None, None, [], ""
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
        self._listener = socket.create_server(("", 0), backlog=64)
        self._listener.setblocking(False)
        # that have not said who they are, and since when
        self._strangers: dict[MessageConnection, float] = {}
        self._next_alive = 0.0
        self._last_look = time.monotonic()
        self.steward_port = 0
        self.hosts: dict[str, RemoteHost] = {}

    def add(self, host: Host) -> None:
        self.hosts[host.name] = RemoteHost(host, self._order, self._line, self._start_seconds)

    def look(self, now: float) -> None:
        """Serve all agents. Called again and again."""
        gap = max(0.0, now - self._last_look - ALIVE_SECONDS)  # this process itself was held up
        self._last_look = now
        self._accept(now)
        for host in self.hosts.values():
            host.look(now, gap)
        if now >= self._next_alive:
            self._next_alive = now + ALIVE_SECONDS
            for host in self.hosts.values():
                if host.connection is not None:
                    host.send({"kind": "alive"})

    def close(self) -> None:
        self._listener.close()
        for stranger in self._strangers:
            stranger.close()
        for host in self.hosts.values():
            host.ask_to_end()
        until = time.monotonic() + _END_SECONDS
        for host in self.hosts.values():
            host.close(until)

    def _accept(self, now: float) -> None:
        with contextlib.suppress(OSError):  # none waits; or this process can open no more files
            while len(self._strangers) < _MOST_STRANGERS:
                accepted, _ = self._listener.accept()
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stranger = MessageConnection(accepted)
                stranger.longest_line = _HELLO_BYTES
                self._strangers[stranger] = now
        for stranger, since in list(self._strangers.items()):
            messages, over = stranger.receive()
            if not messages and over is None and now - since < _HELLO_SECONDS:
                continue
            del self._strangers[stranger]
            host = self._host_of(messages[0]) if messages and over is None else None
            if host is None:
                stranger.close()
            else:
                stranger.longest_line = LONGEST_LINE
                host.connected(stranger, now)

    def _host_of(self, hello: Message) -> RemoteHost | None:
        """The host whose agent says ``hello``; `None` for anybody else's message, whatever it
        is.
        """
        name = hello.get("host")
        host = self.hosts.get(name) if isinstance(name, str) else None
        if (
            host is None
            or host.connection is not None
            or not is_token(hello.get("token"), host.token)
        ):
            return None
        return host

    def _order(self, host: Host, token: str, answer: str) -> Order:
        exported = {name: self._environ[name] for name in exported_names(self._environ)}
        addresses = reachable_candidates(self._environ)
        port = self._listener.getsockname()[1]
        cwd = os.getcwd()
        return Order(
            host.name,
            token,
            answer,
            addresses,
            port,
            self.steward_port,
            self._command,
            cwd,
            host.slots,
            exported,
        )
