"""What a process opens once and keeps: the store, torch.distributed's default group, the watch over the other ranks."""

from __future__ import annotations

import atexit
import json
import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.backends.shared_memory.communicator import open_shared_memory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.store_bootstrap import StoreBootstrap
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.job.excepthook import install_excepthook
from lightning_ring.job.ranks import RankInfo, check_gpu_assignment
from lightning_ring.job.rendezvous.interfaces import offer_interface
from lightning_ring.job.rendezvous.store import open_store
from lightning_ring.job.stalls.report import StallReporter
from lightning_ring.job.threads import fit_threads
from lightning_ring.job.topology import (
    Place,
    carrier_between_nodes,
    exchange_places,
    is_hierarchical,
    nodes_of,
    open_hierarchical,
)
from lightning_ring.job.watch.watch import JobWatch


@dataclass
class Job:
    """This process among its peers.

    ``watch`` and ``stalls`` are `None` in a single process; ``places`` are those of all ranks, empty on one node;
    ``communicator`` is the one opened last, open until the next one is.
    """

    info: RankInfo
    watch: JobWatch | None
    store: dist.Store
    places: list[Place] = field(default_factory=list)
    communicator: Communicator | None = None
    num_groups: int = 0
    num_opened: int = 0
    stalls: StallReporter | None = None

    def check(self) -> None:
        """Raise `PeerFailedError` once another rank has failed."""
        if self.watch is not None:
            self.watch.check()


_job: Job | None = None


def connect(info: RankInfo, device: torch.device, timeout: timedelta) -> Job:
    """Open what all later communicators of this process stand on; the second call returns what the first one opened.

    torch.distributed's default group is up afterwards, NCCL where ``device`` is CUDA and Gloo for CPU tensors, so that
    torchmetrics, SyncBatchNorm and the like work. Collective.

    Raises:
        RankDiscoveryError: The process was connected as another rank before, or two ranks were given one GPU.
    """
    global _job
    if _job is not None:
        if (_job.info.rank, _job.info.world_size) != (info.rank, info.world_size):
            raise RankDiscoveryError(
                f"this process is rank {_job.info.rank} of {_job.info.world_size} already and cannot become rank "
                f"{info.rank} of {info.world_size}. Start a new process for another job."
            )
        offer_interface()
        if _job.watch is not None:
            _job.watch.reset()
        if not dist.is_initialized():  # the script destroyed the group, as scripts do before a test on one device
            if _job.communicator is not None:
                _job.communicator.abandon()
                _job.communicator = None
            _job.num_groups += 1
            _open_default_group(_job, device, timeout)
        return _job
    watch: JobWatch | None = None
    store: dist.Store = dist.HashStore()
    if info.world_size > 1:
        install_excepthook(info)
        store = open_store(info, timeout)
        watch = JobWatch(info, store)
        fit_threads(info, store)
        if device.type == "cuda":  # before NCCL starts and says it in its own words
            _check_gpus(info, device, store)
    job = Job(info, watch, store, exchange_places(info, store) if info.num_nodes > 1 else [])
    job.stalls = StallReporter(watch, store) if watch is not None else None
    _open_default_group(job, device, timeout)
    install_excepthook(info, watch)
    _job = job
    return job


def open_communicator(
    job: Job,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    stall_warning: timedelta,
    topology: str = "auto",
) -> None:
    """Give ``job`` a fresh communicator, and close the one before: an error may have broken it. Collective.

    Args:
        job: From `connect`.
        backend: ``"auto"``, ``"nccl"``, ``"gloo"`` or ``"mpi"``. Auto is NCCL on CUDA; on CPU shared memory in a node,
            else MPI where it started the ranks, else Gloo, and between nodes Gloo, unless MPI may have a better network
            than TCP (`carrier_between_nodes`).
        device: Where gradients live.
        timeout: Past it a collective raises.
        stall_warning: After it a collective that has not finished is reported in the log, with every rank's place.
        topology: ``"auto"``, ``"flat"`` or ``"hierarchical"``; auto is hierarchical on CPU where there are several
            nodes, each with the same number of ranks and more than one.

    Raises:
        ConfigurationError: The backend cannot serve ``device``, MPI did not start the ranks, or the topology cannot be.
    """
    if job.communicator is not None:
        job.communicator.abandon()  # not close: an earlier fit may have left a bucket that a failed peer never sent
        job.communicator = None
    job.num_opened += 1
    nodes = nodes_of(job.places) or [list(range(job.info.world_size))]
    nested = is_hierarchical(topology, nodes, device.type, job.info.rank)
    chosen = _chosen(backend, job, device)
    carrier = carrier_between_nodes(job.places) if backend == "auto" and chosen == "mpi" and job.places else chosen
    patience = WaitPolicy(timeout, job.check, stall_warning)
    if job.stalls is not None:
        job.stalls.follow(patience, job.num_opened)
    if nested:
        store = dist.PrefixStore(f"nodes/{job.num_opened}", job.store) if backend == "auto" else None
        job.communicator = open_hierarchical(nodes, job.info.rank, chosen, carrier, patience, store)
    else:
        job.communicator = _open(job, carrier, patience)


def _chosen(backend: str, job: Job, device: torch.device) -> str:
    if backend == "auto":
        one_node = 1 < job.info.world_size == job.info.local_size
        backend = "nccl" if device.type == "cuda" else "shared memory" if one_node else _by_messages(job.info)
    if backend == "nccl" and device.type != "cuda":
        raise ConfigurationError(f"backend='nccl' moves CUDA tensors, the model is on {device}. Use backend='auto'.")
    if backend == "mpi":
        if device.type != "cpu":
            raise ConfigurationError(
                f"backend='mpi' moves CPU tensors, the model is on {device}. Use backend='auto' (NCCL on CUDA)."
            )
        if job.info.source != "mpi":
            raise ConfigurationError(
                f"backend='mpi' needs ranks that MPI started, these come from {job.info.source}. Start them with "
                "`mpirun -n N python ...` or `ringrun -n N python ...`, or use backend='gloo'."
            )
    return backend


def _by_messages(info: RankInfo) -> str:
    return "mpi" if info.source == "mpi" else "gloo"


def _open(job: Job, backend: str, patience: WaitPolicy) -> Communicator:
    if backend == "shared memory":
        shared = _open_shared_memory(job, patience)
        if shared is not None:
            return shared
        backend = _by_messages(job.info)
    if backend == "mpi":
        from lightning_ring.comm.backends.mpi import MPICommunicator  # imports mpi4py, which starts MPI

        return MPICommunicator(policy=patience)
    return open_torch_communicator(backend, policy=patience)


def _open_shared_memory(job: Job, patience: WaitPolicy) -> Communicator | None:
    store = dist.PrefixStore(f"shared memory/{job.num_opened}", job.store)
    return open_shared_memory(StoreBootstrap(store, range(job.info.world_size), job.info.rank, patience), patience)


def _open_default_group(job: Job, device: torch.device, timeout: timedelta) -> None:
    if dist.is_initialized():  # the user's script opened one, or an earlier strategy of Lightning's
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"default/{job.num_groups}", job.store),
        rank=job.info.rank,
        world_size=job.info.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(_close_default_group)


def _close_default_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_gpus(info: RankInfo, device: torch.device, store: dist.Store) -> None:
    mine = (socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))
    store.set(f"gpu/{info.rank}", json.dumps(mine))
    check_gpu_assignment([tuple(json.loads(store.get(f"gpu/{rank}"))) for rank in range(info.world_size)])
