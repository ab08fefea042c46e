"""torch's store over the steward, beside torch's own; sockets that are shut down under whoever waits on them."""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ring.elastic.gloo_sockets import open_sockets, shut_down
from lightning_ring.elastic.store import StewardStore
from lightning_ring.membership.member import GenerationOver
from tests.membership.serving import first_view, serving

EVERY_BYTE = bytes(range(256))


def test_the_store_behaves_as_torchs_own() -> None:
    with serving() as server:
        (member,) = first_view(server, 1)
        stewards, own = StewardStore(member, 5), dist.HashStore()
        for store in (dist.PrefixStore("a", stewards), dist.PrefixStore("a", own)):
            store.set("bytes", EVERY_BYTE)
            store.set("text", "12")
            assert store.get("bytes") == EVERY_BYTE
            assert store.get("text") == b"12"
            assert store.add("text", 5) == 17
            assert store.add("new", -2) == -2
            assert store.get("text") == b"17"
            assert store.check(["bytes", "text"])
            assert not store.check(["bytes", "none"])
            assert store.compare_set("compared", "", "first") == b"first"
            assert store.compare_set("compared", "other", "second") == b"first"
            assert store.compare_set("compared", "first", "second") == b"second"
            store.wait(["bytes", "compared"])
            assert store.delete_key("bytes")
            assert not store.delete_key("bytes")
            with pytest.raises((RuntimeError, TimeoutError)):
                store.wait(["none"], timedelta(milliseconds=30))


def test_a_store_whose_view_is_over_refuses_everything() -> None:
    with serving() as server:
        one, two = first_view(server, 2)
        stewards = StewardStore(one, 5)
        store = dist.PrefixStore("a", stewards)
        threading.Timer(0.2, two.close).start()
        with pytest.raises(GenerationOver, match="process 1 has died"):
            store.get("never")
        with pytest.raises(GenerationOver):
            store.set("late", "value")


def test_shutting_down_frees_a_reader_and_spares_sockets_that_were_there_before() -> None:
    with socket.create_server(("127.0.0.1", 0)) as door:
        earlier = socket.create_connection(door.getsockname())
        earlier_end, _ = door.accept()
        before = open_sockets()
        later = socket.create_connection(door.getsockname())
        later_end, _ = door.accept()
        new = open_sockets() - before
        assert len(new) == 2
        freed: list[bytes] = []
        reader = threading.Thread(target=lambda: freed.append(later.recv(1)))
        reader.start()
        time.sleep(0.05)
        shut_down(new)
        reader.join(5)
        assert freed == [b""]
        earlier.sendall(b"x")
        assert earlier_end.recv(1) == b"x"
        for connection in (later, later_end):
            connection.close()
        shut_down(new)  # closed meanwhile
        for connection in (earlier, earlier_end):
            connection.close()
