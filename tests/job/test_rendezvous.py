import contextlib
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous import store as rendezvous
from lightning_ring.job.rendezvous.door import NotOurDoor, knock
from lightning_ring.job.rendezvous.greeting import Greeter, greet, listen, reserve_port
from lightning_ring.job.rendezvous.interfaces import (
    ipv4_addresses,
    ipv6_addresses,
    reachable_candidates,
)
from lightning_ring.job.rendezvous.store import agree_on_secret, open_store
from lightning_ring.job.watch import relay
from lightning_ring.job.watch.watch import JobWatch

LOOPBACK = "127.0.0.1"
MINUTE = timedelta(minutes=1)


def ranks(world_size, source):
    return [
        RankInfo(rank, world_size, rank, world_size, 0, 1, source) for rank in range(world_size)
    ]


@pytest.fixture
def rank_0_at(monkeypatch):
    def place(address, port):
        monkeypatch.setenv("MASTER_ADDR", address)
        monkeypatch.setenv("MASTER_PORT", str(port))

    return place


@pytest.fixture
def taken():
    """The listener of another program, and its port."""
    with socket.create_server((LOOPBACK, 0)) as other:
        yield other, other.getsockname()[1]


def assert_two_meet(infos):
    def meet(info):
        time.sleep(0.5 if info.rank == 0 else 0)  # the other comes first, and waits
        return open_store(info, MINUTE)

    with ThreadPoolExecutor(2) as pool:
        stores = list(pool.map(meet, infos))
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"


@pytest.fixture
def free_port():
    with reserve_port() as reserved:
        yield reserved.getsockname()[1]


def test_a_torch_whose_newer_store_takes_no_listening_socket(monkeypatch):
    """torch 2.6."""

    def of_torch_2_6(*args, use_libuv=True, master_listen_fd=None, **settings):
        if use_libuv and master_listen_fd is not None:
            raise NotImplementedError(
                "The libuv TCPStore backend does not support initialization with an listen fd."
            )
        return TCPStore(*args, use_libuv=use_libuv, master_listen_fd=master_listen_fd, **settings)

    monkeypatch.setattr(rendezvous, "TCPStore", of_torch_2_6)
    store = rendezvous._serve("", MINUTE)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_slurm_ranks_derive_the_same_port(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert_two_meet(ranks(2, "slurm"))


def test_a_port_that_is_taken_is_named_by_rank_0(rank_0_at, taken):
    _, port = taken
    rank_0_at(LOOPBACK, port)
    with pytest.raises(RankDiscoveryError, match=f"port {port} of 127.0.0.1.*in use.*MASTER_PORT"):
        open_store(ranks(2, "torchrun")[0], MINUTE)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.0 400 Bad Request\r\n\r\n", b"lightning_ring other-job 1234\n", None, b""]
)
def test_another_program_on_the_port_is_named_by_the_others(monkeypatch, rank_0_at, taken, answer):
    """torch's own store client waits for ever for a server that says nothing (``None``). Another
    one hangs up (``b""``).
    """
    monkeypatch.setattr("lightning_ring.job.rendezvous.greeting._ANSWER_SECONDS", 0.5)
    other, port = taken
    connections = []

    def serve():
        connection, _ = other.accept()
        connection.sendall(answer or b"")
        if answer != b"":
            connections.append(connection)

    threading.Thread(target=serve, daemon=True).start()
    rank_0_at(LOOPBACK, port)
    with pytest.raises(RankDiscoveryError, match=f"Rank 1 asked 127.0.0.1:{port} .* port is taken"):
        open_store(ranks(2, "torchrun")[1], MINUTE)
    for connection in connections:
        connection.close()


def test_a_reserved_port_is_for_those_who_know_its_number():
    with reserve_port() as reserved:
        port = reserved.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((LOOPBACK, port))
        for address in (LOOPBACK, ""):
            listen(address, port).close()


def test_nobody_there(free_port):
    with pytest.raises(
        RankDiscoveryError, match=f"could not reach rank 0 at 127.0.0.1:{free_port} within 1 s"
    ):
        greet(LOOPBACK, free_port, "job", rank=1, timeout=1)


def test_missing_variables_are_named(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankDiscoveryError, match="MASTER_ADDR is ''"):
        open_store(ranks(2, "torchrun")[1], timedelta(seconds=1))


def test_greeter_ends_when_all_have_called():
    door = listen(LOOPBACK)
    port = door.getsockname()[1]
    Greeter(door, "job", count=2, word="4711")
    for hello in ({}, {"rank": []}):  # by one who knows a public secret
        with pytest.raises(NotOurDoor):
            knock([LOOPBACK], port, "job", "rendezvous", hello, seconds=60)
    for secret, rank in (("job", 1), ("guess", 2), ("job", 1), ("job", 2)):
        if secret == "guess":
            with pytest.raises(RankDiscoveryError, match="another job"):
                greet(LOOPBACK, port, secret, rank, timeout=60)
        else:  # a rank that calls twice is one rank
            assert greet(LOOPBACK, port, secret, rank, timeout=60) == ("4711", LOOPBACK)
    with pytest.raises(RankDiscoveryError):
        greet(LOOPBACK, port, "job", rank=2, timeout=0.5)


@pytest.mark.parametrize("given", ["", "from a job script"])
def test_the_secret_lies_in_the_store_only_where_no_launcher_gives_one(monkeypatch, given):
    monkeypatch.setenv("RING_SECRET", given)
    store = HashStore()
    secrets = [agree_on_secret(info, store) for info in ranks(2, "torchrun")]
    assert secrets[0] == secrets[1] == (given or store.get("secret").decode())
    assert store.check(["secret"]) is not bool(given)


def test_interfaces():
    addresses = dict(ipv4_addresses())
    assert LOOPBACK in addresses.values()
    assert not any(address.startswith("127.") for address in reachable_candidates({}))
    for name, address in ipv4_addresses():
        if not address.startswith("127."):
            assert reachable_candidates({"NCCL_SOCKET_IFNAME": name})[0] == address


def test_ranks_of_several_nodes_listen_to_other_hosts(monkeypatch, rank_0_at, free_port):
    rank_0_at("localhost", free_port)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "mine")
    assert_two_meet(
        [replace(info, num_nodes=2, node_rank=info.rank) for info in ranks(2, "torchrun")]
    )


def own_addresses():
    """What a job script may write into MASTER_ADDR, by kind."""
    found = {"name of loopback": "localhost", "host name": socket.gethostname()}
    for address in reachable_candidates({}):
        found.setdefault("IPv4", address)
    for name, address in ipv6_addresses():
        kind = "IPv6 loopback" if name == "lo" else "IPv6"
        if not address.startswith("fe80:"):  # of the link alone
            found.setdefault(kind, address)
    return found


@pytest.mark.parametrize("kind", ["name of loopback", "host name", "IPv4", "IPv6 loopback", "IPv6"])
@pytest.mark.parametrize(("num_nodes", "store_of_torchrun"), [(1, True), (2, False)])
def test_ranks_meet_wherever_the_job_says_that_rank_0_is(
    monkeypatch, rank_0_at, kind, num_nodes, store_of_torchrun
):
    """The store, and then the watch, by each kind of address."""
    address = own_addresses().get(kind, "")
    if not address:
        pytest.skip(f"this host has no {kind} address")
    listeners = []
    monkeypatch.setattr(
        relay, "listen", lambda where: listeners.append(listen(where)) or listeners[-1]
    )
    with contextlib.ExitStack() as cleanup:
        if store_of_torchrun:
            agent = TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=MINUTE)
            rank_0_at(address, agent.port)
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        else:
            rank_0_at(address, cleanup.enter_context(reserve_port("")).getsockname()[1])
        infos = [
            replace(info, num_nodes=num_nodes, node_rank=info.rank * (num_nodes - 1))
            for info in ranks(2, "torchrun")
        ]

        def meet(info):
            store = open_store(info, MINUTE)
            return store, JobWatch(info, store, "secret")

        with ThreadPoolExecutor(2) as pool:
            met = list(pool.map(meet, infos))
        for _, watch in reversed(met):
            cleanup.callback(watch.close)
        assert met[1][1].rank_0["pid"] == os.getpid()
        assert met[1][1].tell({"kind": "news"}, wait=60)
        if num_nodes == 1:  # no stranger reaches the watch
            assert listeners[0].getsockname()[0] in (LOOPBACK, "::1")


@pytest.mark.parametrize("port", ["0", "65536", "-1", "29500.0", "many"])
def test_a_port_that_cannot_be_one_is_refused(rank_0_at, port):
    rank_0_at(LOOPBACK, port)
    for source in ("torchrun", "slurm"):
        with pytest.raises(RankDiscoveryError, match=f"MASTER_PORT is '{port}'"):
            open_store(ranks(2, source)[1], timedelta(seconds=1))


def test_an_address_of_another_host_is_named_by_rank_0(rank_0_at, free_port):
    rank_0_at("192.0.2.200", free_port)  # an address for documentation
    with pytest.raises(
        RankDiscoveryError, match=r"MASTER_ADDR=192\.0\.2\.200 is no address of rank 0's host"
    ):
        open_store(ranks(2, "torchrun")[0], timedelta(seconds=1))
