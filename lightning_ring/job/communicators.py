"""Opens the communicator of a job: which backend, over which topology."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.backends.mpi import MPICommunicator
from lightning_ring.comm.backends.mpi_library import import_mpi
from lightning_ring.comm.backends.shared_memory.communicator import open_shared_memory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.store_bootstrap import StoreBootstrap
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import COLLECTIVES
from lightning_ring.job.job import Job
from lightning_ring.job.members import nodes_of
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.topology import backend_between_nodes, is_hierarchical, open_hierarchical


def open_communicator(
    job: Job,
    backend: str,
    device: torch.device,
    timeout: timedelta,
    stall_warning: timedelta,
    topology: str = "auto",
) -> Communicator:
    """Give ``job`` a new communicator, and close the one before. Collective.

    The arguments are those of `RingStrategy`; ``device`` is where gradients live.
    ``backend="auto"`` is NCCL on CUDA, XCCL on Intel's GPUs; on CPU shared memory in a node, else
    MPI where it started the ranks, else Gloo, and between nodes Gloo, unless MPI may have a better
    network than TCP (`backend_between_nodes`).

    Raises:
        ConfigurationError: The backend cannot serve ``device``, MPI did not start the ranks, or the
            topology cannot be.
    """
    job.drop_communicator()
    job.num_communicators += 1
    nodes = nodes_of(job.members)
    nested = is_hierarchical(topology, nodes, device.type, job.info.rank)
    chosen = _chosen(backend, job.info, device)
    across = chosen
    if backend == "auto" and chosen == "mpi" and len(nodes) > 1:
        across = backend_between_nodes(job.members)
    policy = job.policy = WaitPolicy(timeout, job.check, stall_warning)
    if job.lasting is not None:
        # the generation is over: its ranks do the step again, or have all they need
        policy.grace = 0.0
        policy.opening = job.lasting.opening
    if job.stalls is not None:
        job.stalls.follow(policy, job.num_communicators)
    if nested:
        store = (
            dist.PrefixStore(f"nodes/{job.num_communicators}", job.store)
            if backend == "auto"
            else None
        )
        mpi_comm = _mpi_comm(job) if "mpi" in (chosen, across) else None
        kept = job.lasting.memory if job.lasting is not None else None
        job.communicator = open_hierarchical(
            nodes, job.info.rank, chosen, across, policy, store, mpi_comm, kept
        )
    else:
        job.communicator = _open_flat(job, across, policy, device)
    return job.communicator


def _chosen(backend: str, info: RankInfo, device: torch.device) -> str:
    if backend == "auto":
        one_node = 1 < info.world_size == info.local_size
        backend = COLLECTIVES.get(device.type) or (
            "shared memory" if one_node else _by_messages(info)
        )
    if backend == "nccl" and device.type != "cuda":
        raise ConfigurationError(
            f"backend='nccl' moves CUDA tensors, the model is on {device}. Use backend='auto'."
        )
    if backend == "mpi":
        if device.type != "cpu":
            raise ConfigurationError(
                f"backend='mpi' moves CPU tensors, the model is on {device}. Use backend='auto' "
                "(NCCL on CUDA)."
            )
        if info.source != "mpi":
            raise ConfigurationError(
                f"backend='mpi' needs ranks that MPI started, these come from {info.source}. Start "
                "them with `mpirun -n N python ...` or `ringrun -n N python ...`, or use "
                "backend='gloo'."
            )
    return backend


def _by_messages(info: RankInfo) -> str:
    return "mpi" if info.source == "mpi" else "gloo"


def _open_flat(job: Job, backend: str, policy: WaitPolicy, device: torch.device) -> Communicator:
    if backend == "shared memory":
        store = dist.PrefixStore(f"shared memory/{job.num_communicators}", job.store)
        bootstrap = StoreBootstrap(store, range(job.info.world_size), job.info.rank, policy)
        kept = job.lasting.memory if job.lasting is not None else None
        shared = open_shared_memory(bootstrap, policy, kept=kept)
        if shared is not None:
            return shared
        backend = _by_messages(job.info)
    if backend == "mpi":
        return MPICommunicator(_mpi_comm(job), policy)
    return open_torch_communicator(backend, policy, device)


def _mpi_comm(job: Job) -> Any:
    """MPI's communicator of this job's ranks: ``COMM_WORLD``, or a part of it in a job that goes
    on with fewer.
    """
    mpi = import_mpi()
    launch_ranks = [member.launch_rank for member in job.members]
    if launch_ranks == list(range(mpi.COMM_WORLD.size)):
        return mpi.COMM_WORLD
    group = mpi.COMM_WORLD.group.Incl(launch_ranks)
    # collective over the part alone
    part = mpi.COMM_WORLD.Create_group(group, tag=job.info.generation % 2**15)
    group.Free()
    return part
