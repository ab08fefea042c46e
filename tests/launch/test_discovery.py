"""The command that lists hosts, and the slots that follow from its lists."""

import shlex
import time

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.launch import discovery as module
from lightning_ring.launch.discovery import Discovery
from lightning_ring.launch.hosts import Host, listed_hosts
from lightning_ring.launch.remote import ssh_line
from lightning_ring.launch.slots import Slots


def test_a_list_of_hosts():
    lines = ["a:2", "", "  b  ", "# c", "a:1 # again"]
    assert listed_hosts(lines, 4, "here") == [Host("a", 3), Host("b", 4)]
    assert listed_hosts([], 4, "here") == []
    with pytest.raises(ConfigurationError, match="here, line 1: 'a:x' is not host:slots"):
        listed_hosts(["a:x"], 1, "here")


def test_slots_keep_their_numbers_when_hosts_come_and_go():
    slots = Slots(2, ["true"], {}, [Host("localhost", 1), Host("b", 1)], ssh_line, grows=True)
    try:
        assert slots.open_slots() == [0, 1]
        assert slots.list_hosts([Host("localhost", 1), Host("b", 2), Host("c", 1)]) == [2, 3]
        assert slots.list_hosts([Host("localhost", 1), Host("c", 1)]) == []
        assert slots.open_slots() == [0, 3]
        assert not slots.is_open(2)
        assert slots.list_hosts([Host("localhost", 1), Host("b", 1), Host("c", 1)]) == [1]
        assert set(slots.remote.hosts) == {"b", "c"}
        assert slots.child(3, 9, {}).environ["RING_NODE_RANK"] == "2"
    finally:
        slots.remote.close()


def look(discovery, seconds=60.0):
    until = time.monotonic() + seconds
    discovery.look(time.monotonic())  # begins
    while time.monotonic() < until:
        if (hosts := discovery.look(time.monotonic())) is not None or discovery._process is None:
            return hosts
        time.sleep(0.01)
    raise AssertionError("it has not ended")


@pytest.mark.ranks
def test_a_later_failure_leaves_the_hosts_of_before_and_is_said_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.0)
    answer = tmp_path / "hosts"
    discovery = Discovery(["sh", "-c", f". {shlex.quote(str(answer))}"], slots=2)
    answer.write_text("echo a; echo b:3")
    assert look(discovery) == [Host("a", 2), Host("b", 3)]
    answer.write_text("exit 3")
    assert [look(discovery), look(discovery)] == [None, None]
    assert capsys.readouterr().err.count("ended with exit code 3. It writes one host a line") == 1
    answer.write_text("echo a:0")
    assert look(discovery) is None
    assert "'a:0' is not host:slots" in capsys.readouterr().err
    monkeypatch.setattr(module, "LONGEST_SECONDS", 0.1)
    answer.write_text("sleep 100")
    assert look(discovery) is None
    assert "was ended after" in capsys.readouterr().err
    answer.write_text("sleep 100 & wait")
    discovery.look(time.monotonic())
    process = discovery._process
    discovery.close()
    assert process.returncode == -9


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("command", "seconds", "text"),
    [
        ("exit 4", 60, "ended with exit code 4. It writes one host a line"),
        ("echo a:b", 60, "'a:b' is not host:slots"),
        ("echo a:1", 0.3, "has not listed 2 slots within 0.3 s"),
    ],
)
def test_a_command_that_does_not_list_enough_ends_the_start(command, seconds, text):
    with pytest.raises(ConfigurationError, match=text):
        Discovery(["sh", "-c", command]).wait_for(2, seconds)
