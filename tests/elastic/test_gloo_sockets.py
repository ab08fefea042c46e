"""Gloo's waits end when they are told to, also those for a rank that does not connect or does
not answer.
"""

import contextlib
import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ring.elastic.generations import give_up_opening

_HOST = "127.0.0.1"


class StoreOfOne(dist.Store):
    """Of rank 0 of two. Rank 1 has told that it listens at ``port`` of this host. ``asked`` is
    called for that.
    """

    def __init__(self, port):
        super().__init__()
        self.values = []
        self.asked = lambda: None
        self._port = port

    def set(self, key, value):
        self.values.append(value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key):
        (own,) = [value for value in self.values if socket.inet_aton(_HOST) in value][:1]
        if not key.endswith("1"):
            return own
        at = own.index(socket.inet_aton(_HOST))
        other = own[: at - 2] + self._port.to_bytes(2, "big") + own[at:]
        self.values.append(other)
        self.asked()
        return other

    def wait(self, keys, timeout=None):
        return None

    def has_extended_api(self):
        return False


@contextlib.contextmanager
def silent_port():
    """A port whose low byte is 0, to which the other rank connects, and which does not answer."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        for port in range(0x4000, 0x7F00, 0x100):
            with contextlib.suppress(OSError):
                server.bind((_HOST, port))
                break
        server.listen(0)
        for _ in range(3):  # more than it takes
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield server.getsockname()[1]


@pytest.mark.parametrize("told", ["before", "while it waits"])
@pytest.mark.parametrize("rank_1", ["does not connect", "does not answer"])
def test_a_group_whose_other_rank_is_not_there_is_given_up(rank_1, told, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    errors = []
    # of two ports, that whose bytes in reverse order are the smaller number is connected to
    with silent_port() if rank_1 == "does not answer" else contextlib.nullcontext(0xFFFF) as port:
        store, asked = StoreOfOne(port), threading.Event()

        def give_up():
            arguments = (store.values, 2, thread.is_alive)
            threading.Thread(target=give_up_opening, args=arguments, daemon=True).start()

        def on_asked():
            if told == "before":
                give_up()
                time.sleep(0.1)
            asked.set()

        def open_and_use():
            try:
                group = dist.ProcessGroupGloo(store, 0, 2, timedelta(seconds=120))
                group.barrier().wait()
            except RuntimeError as error:
                errors.append(error)

        store.asked = on_asked
        thread = threading.Thread(target=open_and_use, daemon=True)
        thread.start()
        assert asked.wait(60)
        if told == "while it waits":
            thread.join(0.3)
            assert thread.is_alive(), errors
            give_up()
        thread.join(60)  # of 120
        assert not thread.is_alive()
    assert errors
