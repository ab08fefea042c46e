"""Lines of JSON over a connection."""

import contextlib
import fcntl
import resource
import socket
import threading
import time

import pytest

from lightning_ring.job.watch.messages import MessageConnection


@pytest.fixture
def connected():
    """A socket, and the connection that it sends to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    with one, contextlib.closing(MessageConnection(other)) as connection:
        yield one, connection


def received(connection, until_over=False, number=0):
    found = []
    until = time.monotonic() + 60
    over = None
    while over is None and time.monotonic() < until and (until_over or len(found) < number):
        connection.wait(1.0)
        messages, over = connection.receive()
        found += messages
    return found, over


def test_many_messages_are_not_one_that_is_too_long(connected):
    sender, connection = connected
    line = b'{"kind": "x", "text": "' + 1000 * b"x" + b'"}\n'
    thread = threading.Thread(target=sender.sendall, args=(5000 * line,))
    thread.start()
    time.sleep(0.2)  # the receiver is held up
    messages, over = received(connection, number=5000)
    thread.join()
    assert (len(messages), over) == (5000, None)


def test_a_message_without_an_end_ends_the_connection(connected):
    sender, connection = connected
    connection.longest_line = 1000
    sender.sendall(b'{"kind": "first"}\n' + 200_000 * b"x")
    messages, over = received(connection, until_over=True)
    assert ([message["kind"] for message in messages], over) == (["first"], "a message too long")


def test_waiting_works_with_many_open_files(connected):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this process may open no 2048 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    sender, low = connected
    high = MessageConnection(
        socket.socket(fileno=fcntl.fcntl(low.socket.fileno(), fcntl.F_DUPFD, 1500))
    )
    try:
        high.wait(0.01)
        high.wait(1.0, to_send=True)
        sender.sendall(b'{"kind": "late"}\n')
        assert received(high, number=1)[0] == [{"kind": "late"}]
    finally:
        high.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"kind": 1}', 9000 * b"["])
def test_a_line_that_is_no_message_ends_the_connection(connected, line):
    sender, connection = connected
    sender.sendall(b'{"kind": "first"}\n' + line + b'\n{"kind": "late"}\n')
    messages, over = received(connection, until_over=True)
    assert [message["kind"] for message in messages] == ["first"]
    assert over == "a line that is no message"
