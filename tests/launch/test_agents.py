"""Agents and the process that starts them, against strangers, wrong addresses and programs that
cannot be run.
"""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lightning_ring.job.rendezvous.door import Door, knock
from lightning_ring.launch import agent as agent_module
from lightning_ring.launch import remote as remote_module
from lightning_ring.launch.agent import Agent, Order
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.remote import RemoteChild, RemoteHosts


@contextmanager
def remote(line=lambda host, command: ["true"], **environ):
    hosts = RemoteHosts(["true"], environ, line)
    hosts.add(Host("b", 1))
    try:
        yield hosts
    finally:
        hosts.close()


def order(addresses, port):
    return Order("b", 1, "secret", addresses, port, 1, ["true"], "/", 1, 30.0)


def enter(hosts, **said):
    """Say hello at the door of ``hosts`` as the agent of host b does, but for what is ``said``."""
    hello = {"host": "b", "start": 1} | said
    place = ["127.0.0.1"], hosts._door.port, hosts.secret
    with ThreadPoolExecutor(1) as pool:
        knocking = pool.submit(knock, *place, "agents", hello, 60.0)
        while not knocking.done():
            hosts.look(time.monotonic())
            time.sleep(0.001)
    return knocking.result()[0]


def test_only_the_agent_that_was_started_last_is_let_in():
    with remote(lambda host, command: ["sleep", "600"]) as hosts:
        with pytest.raises(PermissionError, match="no agent of host b is expected"):
            enter(hosts)
        RemoteChild("process 0", 0, {"RING_SECRET": "?"}, hosts.hosts["b"]).start()
        for said in ({"start": 0}, {"host": "c"}):
            with pytest.raises(PermissionError, match=r"no agent of host . is expected"):
                enter(hosts, **said)
        agent = enter(hosts)
        assert agent.next(60)[0] == {"kind": "start", "number": 0, "environ": {}}
        with pytest.raises(PermissionError, match="no agent of host b is expected"):
            enter(hosts)
        agent.close()


def test_an_agent_tries_the_next_address_where_another_program_answers(monkeypatch):
    monkeypatch.setattr(agent_module, "OrphanGuard", lambda line: None)
    monkeypatch.setitem(knock.__kwdefaults__, "answer_seconds", 1.0)
    own = socket.create_server(("127.0.0.1", 0))
    port = own.getsockname()[1]
    addresses = ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    silent, broken, other = (socket.create_server((address, port)) for address in addresses)
    served = SimpleNamespace(
        admit=lambda hello: (hello["host"], {}), take=lambda *_: None, hung_up=lambda *_: None
    )
    doors = [Door(other, "another job", "agents", served), Door(own, "secret", "agents", served)]
    for door in doors:
        door.serve_in_thread("door")
    nonsense = threading.Thread(target=lambda: broken.accept()[0].sendall(b"HTTP/1.0 400\r\n"))
    nonsense.start()
    try:
        agent = Agent(order([*addresses, "127.0.0.1"], port))
        assert agent._address == "127.0.0.1"
        agent._connection.close()
    finally:
        nonsense.join(60)
        for used in (silent, broken, *doors):
            used.close()


@pytest.mark.ranks
def test_an_order_that_nobody_reads_holds_nothing_up(monkeypatch):
    """ssh reads it once it is connected, which takes minutes where a host is down."""
    monkeypatch.setattr(remote_module, "_END_SECONDS", 200.0)
    began = time.monotonic()
    with remote(lambda host, command: ["sleep", "600"], RING_LONG="x" * 1_000_000) as hosts:
        child = RemoteChild("process 0", 0, {}, hosts.hosts["b"])
        child.start()
        hosts.look(time.monotonic())
        assert child.is_running
    assert time.monotonic() - began < 100  # no agent was there to be waited for


def test_a_program_that_cannot_be_run_is_named(capsys):
    with remote(lambda host, command: ["/absent/ssh", "b"]) as hosts:
        child = RemoteChild("process 0", 0, {}, hosts.hosts["b"])
        child.start()
        assert (child.code, child.is_lost, child.is_running) == (127, True, False)
    said = capsys.readouterr().err
    assert (
        "host b is lost with 1 rank: `/absent/ssh` could not be run: No such file or directory"
        in said
    )
