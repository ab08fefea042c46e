"""Agents and the process that starts them, against strangers, wrong addresses and programs that
cannot be run.
"""

from __future__ import annotations

import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch import agent as agent_module
from lightning_ring.launch import remote as remote_module
from lightning_ring.launch.agent import Agent, Order
from lightning_ring.launch.hosts import Host, listed_hosts, parse_hosts
from lightning_ring.launch.remote import HostLine, RemoteChild, RemoteHosts


@contextmanager
def remote(
    line: HostLine = lambda host, command: ["true"], **environ: str
) -> Iterator[RemoteHosts]:
    hosts = RemoteHosts(["true"], environ, line)
    hosts.add(Host("b", 1))
    try:
        yield hosts
    finally:
        hosts.close()


def connect(hosts: RemoteHosts) -> socket.socket:
    connection = socket.create_connection(
        ("127.0.0.1", hosts._listener.getsockname()[1]), timeout=60
    )
    connection.settimeout(60)
    return connection


@pytest.mark.parametrize(
    "said",
    [
        '{"kind": "hello", "host": []}',
        '{"kind": "hello", "host": {"b": 1}, "token": "secret"}',
        '{"kind": "hello", "host": "b"}',
        '{"kind": "hello", "host": "b", "token": ""}',
        '{"kind": "hello", "host": "b", "token": 5}',
        '{"kind": "hello", "host": "b", "token": "sécret \\ud800"}',
        '{"kind": "hello", "host": "c", "token": "secret"}',
        "GET / HTTP/1.0",
        '{"kind": "hello", "host": "b", "token": "secret' + 5000 * "x",
    ],
)
def test_a_stranger_is_hung_up_on_whatever_it_says(said: str) -> None:
    with remote() as hosts, connect(hosts) as stranger:
        hosts.hosts["b"].token = "secret"
        stranger.sendall(said.encode() + b"\n")
        now = until = time.monotonic()
        while not select.select([stranger], [], [], 0.01)[0] and time.monotonic() < until + 60:
            hosts.look(now := now + (4 if said.startswith("GET") else 0))
        assert stranger.recv(100) == b""
        assert hosts.hosts["b"].connection is None
        with connect(hosts) as own:
            own.sendall(b'{"kind": "hello", "host": "b", "token": "secret"}\n')
            hosts.hosts["b"].answer = "and mine"
            while hosts.hosts["b"].connection is None:
                hosts.look(time.monotonic())
            assert json.loads(own.makefile().readline()) == {
                "kind": "welcome",
                "answer": "and mine",
            }


def test_a_stranger_that_says_nothing_is_hung_up_on_and_many_are_not_let_in() -> None:
    with remote() as hosts:
        connections, began = [], time.monotonic()
        for _ in range(70):
            connections.append(connect(hosts))
            hosts.look(began)
        assert len(hosts._strangers) == 64
        hosts.look(began + 11)
        assert connections[0].recv(1) == b""
        for connection in connections:
            connection.close()


def order(addresses: list[str], port: int) -> Order:
    return Order("b", "secret", "and mine", addresses, port, 1, ["true"], "/", 1)


def test_an_agent_tries_the_next_address_where_another_program_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_module, "OrphanGuard", lambda line: None)
    monkeypatch.setattr(agent_module, "_CONNECT_SECONDS", 1.0)
    own = socket.create_server(("127.0.0.1", 0))
    port = own.getsockname()[1]
    others = [
        socket.create_server((address, port)) for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4")
    ]
    answers = [
        b"",
        b'{"kind": "start", "number": 0, "environ": {}}\n',
        b'{"kind": "welcome", "answer": "secret"}\n',
    ]
    heard = []
    kept = []

    def serve(listener: socket.socket, answer: bytes) -> None:
        connection, _ = listener.accept()
        heard.append(json.loads(connection.makefile().readline())["host"])
        connection.sendall(answer)
        kept.append(connection)

    pairs = [
        *zip(others, answers, strict=True),
        (own, b'{"kind": "welcome", "answer": "and mine"}\n{"kind": "end"}\n'),
    ]
    threads = [threading.Thread(target=serve, args=pair, daemon=True) for pair in pairs]
    for thread in threads:
        thread.start()
    try:
        agent = Agent(order(["127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.1"], port))
        assert agent._address == "127.0.0.1"
        assert agent._children == {}
        assert heard == ["b"] * 4
        assert [message["kind"] for message in agent._first] in (["end"], [])
        agent._connection.close()
    finally:
        for thread in threads:
            thread.join(60)
        for used in [own, *others, *kept]:
            used.close()


@pytest.mark.ranks
def test_an_order_that_nobody_reads_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """ssh reads it once it is connected, which takes minutes where a host is down."""
    monkeypatch.setattr(remote_module, "_END_SECONDS", 200.0)
    began = time.monotonic()
    with remote(lambda host, command: ["sleep", "600"], RING_LONG="x" * 1_000_000) as hosts:
        child = RemoteChild("process 0", 0, {}, hosts.hosts["b"])
        child.start(None)
        hosts.look(time.monotonic())
        assert child.is_running
    assert time.monotonic() - began < 100  # no agent was there to be waited for


def test_a_program_that_cannot_be_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with remote(lambda host, command: ["/absent/ssh", "b"]) as hosts:
        child = RemoteChild("process 0", 0, {}, hosts.hosts["b"])
        child.start(None)
        assert (child.code, child.is_lost, child.is_running) == (127, True, False)
    said = capsys.readouterr().err
    assert (
        "host b is lost with 1 ranks: `/absent/ssh` could not be run: No such file or directory"
        in said
    )


def test_a_host_is_no_option_of_ssh() -> None:
    for text in ("-F:2", "a:1,-oX"):
        with pytest.raises(ConfigurationError, match="is not host:slots"):
            parse_hosts(text)
    with pytest.raises(ConfigurationError, match="is not host:slots"):
        listed_hosts(["-F"], 1, "here")
