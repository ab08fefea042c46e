"""The door of all listeners: strangers, a guest, and who only pretends to be one or the other."""

import contextlib
import json
import os
import resource
import socket
import struct
import threading
import time

import pytest

from lightning_ring.job.rendezvous import door as door_module
from lightning_ring.job.rendezvous.door import Door, NotOurDoor, knock
from tests.processes import wait_for

LOOPBACK = "127.0.0.1"
WAIT = 60.0


class Listed:
    """Admits each name once, and lists what guests send."""

    def __init__(self):
        self.taken = []
        self.ended = []
        self.door = Door(socket.create_server((LOOPBACK, 0)), "secret", "test", self)

    def admit(self, hello):
        if hello["name"] in self.door.guests:
            raise PermissionError(f"{hello['name']} is here already")
        return hello["name"], {"told": 7}

    def take(self, guest, message):
        self.taken.append(message)

    def hung_up(self, guest, why):
        self.ended.append((guest, why))


@pytest.fixture
def served():
    listed = Listed()
    listed.door.serve_in_thread("door")
    yield listed
    listed.door.close()


def enter(served, name="a", secret="secret"):
    connection, welcome = knock([LOOPBACK], served.door.port, secret, "test", {"name": name}, WAIT)
    assert welcome["told"] == 7
    return connection


def stranger(served, *said):
    connection = socket.create_connection((LOOPBACK, served.door.port), timeout=WAIT)
    for part in said:
        connection.sendall(part)
    return connection


def is_hung_up_on(connection):
    """Whether nothing but a challenge and a refusal came before the end."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(4096):
            said += part
    kinds = [json.loads(line)["kind"] for line in said.splitlines()]
    return kinds in ([], ["challenge"], ["challenge", "refused"])


@pytest.mark.parametrize(
    "said",
    [
        100_000 * b"\n",
        b"GET / HTTP/1.0\r\n\r\n",
        struct.pack("!Q", 2**60) + 5000 * b"x",
        b'{"kind": "hello", "name": "a"}\n',
        b'{"kind": "hello", "name": "a", "proof": 5, "nonce": []}\n',
        b'{"kind": "hello", "name": "a", "proof": "\\ud800"}\n',
        b'{"kind": "left"}\n{"kind": "left"}\n',
    ],
)
def test_a_stranger_is_hung_up_on_whatever_it_says(served, said):
    guest = enter(served)
    connection = stranger(served)
    with contextlib.suppress(ConnectionError):
        connection.sendall(said)
    assert is_hung_up_on(connection)
    assert list(served.door.guests) == ["a"]
    guest.send({"kind": "news"})
    guest.close()
    wait_for(lambda: served.ended)
    assert [message["kind"] for message in served.taken] == ["hello", "news"]


def test_a_hello_has_a_deadline_however_slowly_it_comes(served, monkeypatch):
    monkeypatch.setattr(door_module, "HELLO_SECONDS", 0.5)
    began, connection = time.monotonic(), stranger(served)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < began + WAIT:
            connection.sendall(b"x")
            time.sleep(0.02)
    assert is_hung_up_on(connection)
    assert time.monotonic() - began < WAIT


def test_the_oldest_stranger_is_dropped_for_the_next_and_a_guest_never(served):
    guest = enter(served)
    strangers = [stranger(served) for _ in range(door_module.MOST_STRANGERS + 40)]
    assert all(is_hung_up_on(one) for one in strangers[:39])
    enter(served, "b").close()
    guest.send({"kind": "news"})
    wait_for(lambda: len(served.taken) == 3)
    assert len(served.door._strangers) <= door_module.MOST_STRANGERS
    for one in strangers:
        one.close()


def test_guests_that_are_expected_may_come_all_at_once(served):
    served.door.expected = 40
    strangers = [stranger(served) for _ in range(door_module.MOST_STRANGERS + 40)]
    guest = enter(served)
    assert is_hung_up_on(strangers[0])  # one too many came
    assert len(served.door._strangers) == len(strangers) - 1
    for one in [*strangers, guest]:
        one.close()


def test_who_does_not_know_the_secret_and_who_is_here_already_are_refused(served):
    guest = enter(served)
    with pytest.raises(NotOurDoor, match="another job"):
        enter(served, "b", secret="guess")
    with pytest.raises(PermissionError, match="a is here already"):
        enter(served, "a")
    guest.close()


def test_a_hello_that_was_overheard_is_worth_nothing(served):
    """Someone in the middle hands everything on, and says the same hello again."""
    heard = []
    with socket.create_server((LOOPBACK, 0)) as middle:

        def hand_on():
            ours, _ = middle.accept()
            with ours, stranger(served) as theirs:
                for one, other in ((theirs, ours), (ours, theirs), (theirs, ours)):
                    heard.append(one.recv(4096))
                    other.sendall(heard[-1])

        thread = threading.Thread(target=hand_on)
        thread.start()
        knock([LOOPBACK], middle.getsockname()[1], "secret", "test", {"name": "a"}, WAIT)[0].close()
        thread.join()
    wait_for(lambda: not served.door.guests)
    assert b'"hello"' in heard[1]
    assert b"secret" not in b"".join(heard)
    assert is_hung_up_on(stranger(served, heard[1]))
    assert len(served.taken) == 1


@pytest.mark.parametrize(
    "answer", [b"", b"{}\n", b'{"kind": "welcome", "told": 7, "proof": "?"}\n']
)
def test_a_door_proves_itself_too(answer):
    with socket.create_server((LOOPBACK, 0)) as listener:

        def pretend():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b'{"kind": "challenge", "nonce": "1"}\n')
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(OSError, match=r"answered|hung up"):
            knock([LOOPBACK], listener.getsockname()[1], "secret", "test", {}, WAIT, once=True)
        thread.join()


def test_a_process_that_can_open_no_more_files_lets_guests_in_later():
    listed, limits = Listed(), resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    first, second = stranger(listed), stranger(listed)
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, limits[1]))
        with contextlib.suppress(OSError):
            while len(taken) < 1000:
                taken.append(os.dup(0))
        began = time.monotonic()
        listed.door.serve(1.0)
        assert first.recv(100) == b'{"kind": "full"}\n'
        listed.door.serve(1.0)
        assert second.recv(100) == b'{"kind": "full"}\n'
        listed.door.serve(0.2)
        assert time.monotonic() - began > 0.1, "it looks at once for what it cannot accept"
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    listed.door.serve_in_thread("door")
    enter(listed).close()
    listed.door.close()
    for one in (first, second):
        one.close()
