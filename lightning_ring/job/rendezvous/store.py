"""The key-value store through which ranks meet; torch.distributed and the job watch use it too."""

from __future__ import annotations

import contextlib
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from secrets import token_hex
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from lightning_ring.comm.backends.mpi_library import import_mpi
from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.launchers import first_host
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.door import SECRET
from lightning_ring.job.rendezvous.greeting import LOOPBACK, Greeter, greet, listen
from lightning_ring.job.rendezvous.interfaces import prefer_interface, reachable_candidates
from lightning_ring.job.watch.relay import host_of

_PROBE_SECONDS = 5.0  # for one of rank 0's addresses


def open_store(info: RankInfo, timeout: timedelta) -> Store:
    """Open the job's store. Collective; ``timeout`` bounds each wait for another rank.

    With MPI, rank 0 takes a free port on the interface that the others reach, and hands it out over
    MPI: no MASTER_ADDR, no race for a port. The store of an initialised torch.distributed is used.
    Sets GLOO_SOCKET_IFNAME (`interfaces.offer_interface`).
    """
    if (opened := _store_of_open_group(info)) is not None:
        return opened
    if info.source == "mpi":
        return _open_over_mpi(info, timeout)
    address, port, name = _known_address(info)
    if info.source == "torchrun" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        _prefer_interface_towards(address, info)
        return _connect(address, port, info.rank, timeout)
    # Without a secret this name still tells the job from others.
    secret = f"{os.environ.get(SECRET, '')} {name}"
    if info.rank == 0:
        # Ranks of several nodes may reach this host through any interface.
        where = address if info.num_nodes == 1 else ""
        store = _serve(where, timeout)
        Greeter(listen(where, port), secret, info.world_size - 1, str(store.port))
        _prefer_interface_towards(address, info)
        return store
    store_port, own_address = greet(address, port, secret, info.rank, timeout.total_seconds())
    prefer_interface(own_address)
    return _connect(address, int(store_port), info.rank, timeout)


def agree_on_secret(info: RankInfo, store: Store) -> str:
    """The job's secret, by which its ranks know each other from strangers. Collective.

    It comes from RING_SECRET, which our launchers set and a job script may set, or over MPI.
    Otherwise it lies in ``store``, where whoever reaches that can read it.
    """
    if info.source == "mpi":
        return str(import_mpi().COMM_WORLD.bcast(token_hex(16)))
    if secret := os.environ.get(SECRET):
        return secret
    if info.rank == 0:
        store.set("secret", token_hex(16))
    return store.get("secret").decode()


def _store_of_open_group(info: RankInfo) -> Store | None:
    if not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (info.rank, info.world_size):
        raise RankDiscoveryError(
            f"torch.distributed was initialised as rank {dist.get_rank()} of "
            f"{dist.get_world_size()}, but this process is rank {info.rank} of {info.world_size} "
            f"({info.source}). Initialise it with the launcher's ranks, or leave it to the "
            "strategy."
        )
    store = dist.distributed_c10d._get_default_store()
    host = host_of(store)
    if info.num_nodes > 1 and not host:
        return None
    _prefer_interface_towards(host, info)
    return PrefixStore("lightning_ring", store)


def _known_address(info: RankInfo) -> tuple[str, int, str]:
    """Address and port that every rank knows beforehand, and the name of the job."""
    if info.source == "ringrun":
        address, _, number = _variable("RING_STORE").rpartition(":")
        return address, int(number), info.source
    if info.source == "slurm":
        job, step = int(os.environ.get("SLURM_JOB_ID", 0)), int(os.environ.get("SLURM_STEP_ID", 0))
        host = (
            first_host(os.environ.get("SLURM_STEP_NODELIST", ""))
            if info.num_nodes > 1
            else LOOPBACK
        )
        # Below the range that systems give out; another one for each job and step.
        port = 15000 + (job * 31 + step) % 16000
        port = int(_variable("MASTER_PORT")) if "MASTER_PORT" in os.environ else port
        return os.environ.get("MASTER_ADDR", host), port, f"{job}.{step}"
    # MASTER_ADDR may be of another job.
    address = LOOPBACK if info.source == "spawn" else _variable("MASTER_ADDR")
    job_name = os.environ.get("TORCHELASTIC_RUN_ID", "") + os.environ.get(
        "TORCHELASTIC_RESTART_COUNT", ""
    )
    return address, int(_variable("MASTER_PORT")), job_name or info.source


def _variable(name: str) -> str:
    value = os.environ.get(name, "")
    is_port = value.isascii() and value.isdigit() and 0 < int(value) < 65536
    if not value or (name == "MASTER_PORT" and not is_port):
        raise RankDiscoveryError(
            f"{name} is {value!r}, and without it the ranks cannot find rank 0. Set MASTER_ADDR to "
            "rank 0's host and MASTER_PORT to a free port there, or start the ranks with mpirun, "
            "torchrun or ringrun, which do it."
        )
    return value


def _serve(address: str, timeout: timedelta) -> TCPStore:
    listener = listen(address)
    place = address or LOOPBACK, listener.getsockname()[1]
    settings: dict[str, Any] = {
        "is_master": True,
        "timeout": timeout,
        "wait_for_workers": False,
        "master_listen_fd": listener.detach(),
    }
    try:
        return TCPStore(*place, **settings)
    # torch 2.6: its newer server cannot take a socket that listens already
    except NotImplementedError:
        return TCPStore(*place, use_libuv=False, **settings)


def _connect(address: str, port: int, rank: int, timeout: timedelta) -> TCPStore:
    try:
        return TCPStore(address, port, is_master=False, timeout=timeout, wait_for_workers=False)
    # DistNetworkError and DistStoreError have a C++ stack.
    except RuntimeError as error:
        raise RankDiscoveryError(
            f"Rank {rank} could not reach the job's store at {address}:{port} within "
            f"{timeout.total_seconds():.0f} s: {str(error).splitlines()[0]}"
        ) from error


def _open_over_mpi(info: RankInfo, timeout: timedelta) -> Store:
    world = import_mpi().COMM_WORLD
    address = LOOPBACK
    if info.num_nodes > 1:
        address = _agree_on_address(world, info)
    else:
        prefer_interface(LOOPBACK)
    if info.rank != 0:
        return _connect(address, world.bcast(None), info.rank, timeout)
    store = _serve(address, timeout)
    world.bcast(store.port)
    return store


def _agree_on_address(world: Any, info: RankInfo) -> str:
    """The first of rank 0's addresses that every rank reaches. Collective over MPI."""
    greeter = offer = None
    if info.rank == 0:
        secret = token_hex(16)
        # for one more than calls: it answers until it is closed
        greeter = Greeter(listen(""), secret, info.world_size, "here")
        offer = reachable_candidates(os.environ), greeter.door.port, secret
    candidates, port, secret = world.bcast(offer)

    def ask(address: str) -> str | None:
        try:
            return greet(address, port, secret, info.rank, _PROBE_SECONDS, once=True)[1]
        except RankDiscoveryError:
            return None

    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(ask, candidates))
    # candidates that answer, each with this host's own address on the way to it
    reached = {name: own for name, own in zip(candidates, answers, strict=True) if own}
    by_all = set(candidates).intersection(*world.allgather(set(reached)))
    if greeter is not None:
        greeter.door.close()
    chosen = next((address for address in candidates if address in by_all), None)
    if chosen is None:
        raise RankDiscoveryError(
            "No address of rank 0's host is reachable from every rank; tried "
            f"{', '.join(candidates) or 'none'}. Open the hosts' firewalls to each other, or name "
            "the network that joins them in GLOO_SOCKET_IFNAME."
        )
    prefer_interface(reached[chosen])
    return chosen


def _prefer_interface_towards(host: str, info: RankInfo) -> None:
    address = LOOPBACK if info.num_nodes == 1 else host
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            address = probe.getsockname()[0]
    prefer_interface(address)
