"""torch's store over the steward, beside torch's own; sockets that are shut down under whoever
waits on them.
"""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_ring.elastic.generations import shut_down_sockets
from lightning_ring.elastic.membership import GenerationOver
from lightning_ring.elastic.store import StewardStore
from tests.elastic.serving import first_view, serving

EVERY_BYTE = bytes(range(256))


def test_the_store_behaves_as_torchs_own(server):
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
        assert store.compare_set("absent", "other", "second") == b"other"
        store.wait(["bytes", "compared"])
        assert store.delete_key("bytes")
        assert not store.delete_key("bytes")
        with pytest.raises((RuntimeError, TimeoutError)):
            store.wait(["none"], timedelta(milliseconds=30))


def test_a_store_whose_view_is_over_refuses_everything(server):
    one, two = first_view(server, 2)
    stewards = StewardStore(one, 60)
    store = dist.PrefixStore("a", stewards)
    threading.Timer(0.2, two.close).start()
    with pytest.raises(GenerationOver, match="process 1 has died"):
        store.get("never")
    with pytest.raises(GenerationOver):
        store.set("late", "value")


def test_shutting_down_frees_whoever_waits_in_gloo_and_spares_all_other_sockets():
    with serving() as server, socket.create_server(("127.0.0.1", 0)) as listening:
        stores = [StewardStore(member, 10) for member in first_view(server, 2)]
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(lambda rank: gloo_group(stores[rank], rank), range(2)))
            # as of a logger, in another thread
            others = socket.create_connection(listening.getsockname())
            others_end, _ = listening.accept()
            received = pool.submit(groups[0].recv([torch.empty(1)], 1, 0).wait)
            time.sleep(0.05)
            assert not received.done()
            shut_down_sockets(stores[0].values)
            assert isinstance(received.exception(60), RuntimeError)
        others.sendall(b"x")
        assert others_end.recv(1) == b"x"
        stores[0].set("the steward", "is still there")
        for connection in (others, others_end):
            connection.close()
        shut_down_sockets(stores[0].values)  # closed meanwhile


def gloo_group(store, rank):
    return dist.ProcessGroupGloo(dist.PrefixStore("group", store), rank, 2, timedelta(seconds=60))
