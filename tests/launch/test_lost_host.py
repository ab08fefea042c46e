"""A host that says nothing is lost within the promised time. The clock is the test's own: no
machine is too slow.
"""

import select
import socket
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from lightning_ring.job.watch.messages import MessageConnection
from lightning_ring.launch import agent as agent_module
from lightning_ring.launch.agent import AGENT_SECONDS, ALIVE_SECONDS, Agent
from lightning_ring.launch.child import Child
from lightning_ring.launch.elastic import LOOK_SECONDS
from lightning_ring.launch.hosts import Host
from lightning_ring.launch.remote import LOST_SECONDS, RemoteChild, RemoteHosts
from tests.launch.test_agents import enter, order

PROMISED = 1.5  # seconds from the cut of a link until the steward counts a host's ranks as dead
SLEEP = ["sleep", "600"]


def test_the_limits_keep_the_promise_and_ranks_are_killed_before_they_count_as_dead():
    """What was said last may have left up to `ALIVE_SECONDS` before the cut."""
    assert LOST_SECONDS == 1.4
    assert LOST_SECONDS + LOOK_SECONDS < PROMISED
    assert AGENT_SECONDS + agent_module._LOOK_SECONDS < LOST_SECONDS - ALIVE_SECONDS


class Cluster:
    """The steward's side of host ``b``, whose agent is a socket of this test. ``now`` is the
    time.
    """

    def __init__(self, hosts):
        self.hosts = hosts
        self.child = RemoteChild("process 0", 0, {}, hosts.hosts["b"])
        self.child.start()
        self.agent = enter(hosts)
        self.now = hosts._last_look

    def say(self):
        self.agent.send({"kind": "alive", "idle": {}})
        ready = select.poll()
        ready.register(self.hosts._door.guests["b"].connection.socket, select.POLLIN)
        assert ready.poll(60_000)  # it has arrived

    def looks_until_lost(self, seconds=10.0):
        """The seconds after which the host is lost; `None` if it is not within ``seconds``."""
        began = self.now
        while self.now - began < seconds:
            self.now += LOOK_SECONDS
            self.hosts.look(self.now)
            if self.child.is_lost:
                return self.now - began
        return None


@pytest.fixture
def cluster():
    hosts = RemoteHosts(["true"], {}, lambda host, command: SLEEP)
    hosts.add(Host("b", 1))
    try:
        cluster = Cluster(hosts)
        yield cluster
        cluster.agent.close()
    finally:
        hosts.close()


def test_a_host_is_lost_1_4_seconds_after_its_last_word(cluster, capsys):
    assert cluster.looks_until_lost(1.3) is None
    cluster.say()
    assert cluster.looks_until_lost(1.3) is None
    cluster.say()
    lost = cluster.looks_until_lost()
    assert lost == pytest.approx(LOST_SECONDS, abs=2.5 * LOOK_SECONDS)
    assert (cluster.child.dead, cluster.child.code) == (True, -9)
    assert (
        "host b is lost with 1 rank: its agent has said nothing for 1.4 s"
        in capsys.readouterr().err
    )


def test_time_in_which_the_steward_was_stopped_does_not_count(cluster):
    assert cluster.looks_until_lost(0.5) is None
    cluster.now += 100
    assert cluster.looks_until_lost(0.5) is None
    assert cluster.looks_until_lost() is not None


@contextmanager
def agent_of(steward, monkeypatch):
    """An agent that is connected to ``steward`` and has one process; and its clock, which moves
    in waits alone.
    """
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    ours = socket.create_connection(steward.getsockname(), timeout=60)
    connection = MessageConnection(ours)

    def wait(seconds):
        clock.now += seconds

    connection.wait = wait  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(agent_module, "time", clock)
    monkeypatch.setattr(
        agent_module, "OrphanGuard", lambda line: SimpleNamespace(close=lambda: None)
    )
    monkeypatch.setattr(Agent, "_connect", lambda self: connection)
    agent = Agent(order([], 0))
    agent._children[0] = child = Child("process 0", SLEEP, {})
    child.start("/")
    try:
        yield agent, clock
    finally:
        child.kill_session()
        assert child.process is not None
        child.process.wait(60)
        connection.close()


def test_an_agent_that_hears_nothing_for_a_second_kills_its_ranks(monkeypatch):
    with (
        socket.create_server(("127.0.0.1", 0)) as steward,
        agent_of(steward, monkeypatch) as (agent, clock),
    ):
        assert agent.run() == 1
        assert clock.now == pytest.approx(AGENT_SECONDS, abs=2.5 * agent_module._LOOK_SECONDS)
        process = agent._children[0].process
        assert process is not None
        assert process.wait(60) == -9
