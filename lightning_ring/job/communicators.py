"""Opens the communicator of a job: which backend, over which topology."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, Store

from lightning_ring.comm.backends.gloo import (
    GlooCommunicator,
    open_gloo_subgroup,
    open_gloo_transport,
    open_torch_communicator,
)
from lightning_ring.comm.backends.mpi import (
    MPICommunicator,
    open_mpi_subgroup,
    open_mpi_transport,
)
from lightning_ring.comm.backends.mpi_library import import_mpi
from lightning_ring.comm.backends.shared_memory.communicator import (
    open_shared_memory,
)
from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.comm.store_bootstrap import StoreBootstrap
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import COLLECTIVES
from lightning_ring.job.job import Job
from lightning_ring.job.members import nodes_of
from lightning_ring.job.ranks import RankInfo

_log = logging.getLogger("lightning_ring")

Nodes = Sequence[Sequence[int]]
"""The ranks of each node."""


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
    ``backend="auto"`` is NCCL on CUDA and XCCL on Intel's GPUs. On CPU it is shared memory in a
    node, else MPI where it started the ranks, else Gloo; between nodes Gloo, or MPI where every
    host has RDMA.

    Raises:
        ConfigurationError: The backend cannot serve ``device``, MPI did not start the ranks, or the
            topology cannot be.
    """
    job.drop_communicator()
    job.num_communicators += 1
    nodes, info = nodes_of(job.members), job.info
    nested = is_hierarchical(topology, nodes, device.type, info.rank)
    chosen = across = _chosen(backend, info, device)
    if backend == "auto" and chosen == "mpi" and len(nodes) > 1:
        # Over TCP Gloo is faster, but it cannot use RDMA.
        across = "mpi" if all(member.rdma for member in job.members) else "gloo"
    policy = job.policy = WaitPolicy(timeout, job.check, stall_warning)
    kept: KeptMemory | None = None
    if job.lasting is not None:
        # the generation is over: its ranks do the step again, or have all they need
        policy.grace = 0.0
        policy.opening = job.lasting.opening
        kept = job.lasting.memory
    if job.stalls is not None:
        job.stalls.follow(policy, job.num_communicators)
    store = PrefixStore(f"communicator/{job.num_communicators}", job.store)
    if nested:
        memory_store = store if backend == "auto" else None
        job.communicator = open_hierarchical(
            nodes, info.rank, chosen, across, policy, memory_store, kept
        )
    elif across == "shared memory":
        bootstrap = StoreBootstrap(store, range(info.world_size), info.rank, policy)
        job.communicator = open_shared_memory(bootstrap, policy, kept=kept)
        across = "mpi" if info.source == "mpi" else "gloo"
    if job.communicator is not None:
        return job.communicator
    if across == "mpi":
        job.communicator = MPICommunicator(import_mpi().COMM_WORLD, policy)
    else:
        opened = job.communicator = open_torch_communicator(across, policy, device)
        if isinstance(opened, GlooCommunicator) and job.stalls and info.world_size == 2:
            opened.late_calls = job.stalls.late_calls
    return job.communicator


def _chosen(backend: str, info: RankInfo, device: torch.device) -> str:
    if backend == "auto":
        by_messages = "mpi" if info.source == "mpi" else "gloo"
        one_node = 1 < info.world_size == info.local_size
        backend = "shared memory" if one_node else by_messages
        backend = COLLECTIVES.get(device.type, backend)
    moved = {"nccl": "cuda", "mpi": "cpu"}.get(backend, device.type)
    if device.type != moved:
        raise ConfigurationError(
            f"backend={backend!r} moves {moved.upper()} tensors, the model is on {device}. Use "
            "backend='auto'."
        )
    if backend == "mpi" and info.source != "mpi":
        raise ConfigurationError(
            f"backend='mpi' needs ranks that MPI started, these come from {info.source}. Start "
            "them with `mpirun -n N python ...` or `ringrun -n N python ...`, or use "
            "backend='gloo'."
        )
    return backend


def is_hierarchical(topology: str, nodes: Nodes, device_type: str, rank: int = 0) -> bool:
    """Whether to nest rings on ``nodes``; for ``"auto"`` rank 0 logs why not, at INFO."""
    if topology == "flat":
        return False
    obstacle = _obstacle(nodes, device_type)
    if obstacle and topology == "hierarchical":
        raise ConfigurationError(
            f"topology='hierarchical' cannot work here: {obstacle}. Use topology='auto' or 'flat'."
        )
    if obstacle and len(nodes) > 1 and rank == 0:
        _log.info("one flat ring over all ranks: %s.", obstacle)
    return not obstacle


def _obstacle(nodes: Nodes, device_type: str) -> str:
    if device_type != "cpu":
        return "between GPUs, NCCL itself arranges the ranks by node"
    if len(nodes) == 1:
        return f"all {len(nodes[0])} ranks are on one node"
    sizes = [len(ranks) for ranks in nodes]
    if len(set(sizes)) > 1:
        shown = ", ".join(
            f"{size} (ranks {', '.join(map(str, ranks))})"
            for size, ranks in zip(sizes, nodes, strict=True)
        )
        return f"the nodes hold different numbers of ranks: {shown}"
    return "no two ranks share a node" if sizes[0] == 1 else ""


def open_hierarchical(
    nodes: Nodes,
    rank: int,
    backend: str,
    across_backend: str,
    policy: WaitPolicy,
    store: Store | None,
    kept: KeptMemory | None = None,
) -> Communicator:
    """One communicator over those of each node and those of equal local ranks. Collective.

    ``backend`` (gloo or mpi) moves small tensors, and tensors in a node without shared memory;
    ``across_backend`` those between nodes. Ranks of a node meet in the empty ``store`` to share
    memory, which ``kept`` lends.
    """
    peers = [sorted(ranks) for ranks in zip(*nodes, strict=True)]
    world = import_mpi().COMM_WORLD if "mpi" in (backend, across_backend) else None

    def over(backend: str, parts: Nodes) -> Communicator:
        if backend == "gloo":
            return open_gloo_subgroup(parts, policy)
        return open_mpi_subgroup(world, parts, policy)

    in_node = _through_memory(nodes, rank, policy, store, kept) if store is not None else []
    inward, outward = in_node or [over(backend, nodes), over(backend, nodes)]
    across = over(across_backend, peers)
    if rank == 0:
        _log.info(
            f"{len(nodes)} nodes of {len(peers)} ranks: {type(inward).__name__} in a node, "
            f"{type(across).__name__} between nodes."
        )
    return HierarchicalCommunicator(
        open_mpi_transport(world, policy) if backend == "mpi" else open_gloo_transport(policy),
        inward,
        outward,
        across,
        peers,
        policy,
    )


def _through_memory(
    nodes: Nodes, rank: int, policy: WaitPolicy, store: Store, kept: KeptMemory | None
) -> list[Communicator]:
    """Both communicators of this rank's node; empty if some node cannot share memory."""
    number, members = next(node for node in enumerate(nodes) if rank in node[1])
    bootstrap = StoreBootstrap(PrefixStore(f"node/{number}", store), members, rank, policy)
    first = open_shared_memory(bootstrap, policy, members=members, kept=kept)
    opened = [first]
    if first is not None:
        opened.append(open_shared_memory(first, policy, members=members, beside=first))
    all_ranks = range(sum(map(len, nodes)))
    exchange = StoreBootstrap(PrefixStore("all", store), all_ranks, rank, policy)
    if not all(exchange.all_gather_object(opened[-1] is not None)):
        return []
    return [comm for comm in opened if comm is not None]
