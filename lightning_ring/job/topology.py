"""Flat or hierarchical communicators, and the backend between nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.distributed import PrefixStore, Store

from lightning_ring.comm.backends.gloo import open_gloo_subgroup, open_gloo_transport
from lightning_ring.comm.backends.mpi import open_mpi_subgroup, open_mpi_transport
from lightning_ring.comm.backends.shared_memory.communicator import (
    SharedMemoryCommunicator,
    open_shared_memory,
)
from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.comm.store_bootstrap import StoreBootstrap
from lightning_ring.comm.transport import Transport
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.job.members import JobMember

_log = logging.getLogger("lightning_ring")


def backend_between_nodes(members: Sequence[JobMember]) -> str:
    """The backend for CPU tensors between nodes, where MPI started the ranks: ``"gloo"`` or
    ``"mpi"``.

    Over TCP Gloo is the faster one (docs/performance.md). It cannot use RDMA, which MPI
    libraries can.
    """
    return "mpi" if all(member.rdma for member in members) else "gloo"


def is_hierarchical(
    topology: str, nodes: Sequence[Sequence[int]], device_type: str, rank: int = 0
) -> bool:
    """Whether ranks on ``nodes`` take hierarchical communicators; for ``"auto"`` rank 0 logs why
    not, at INFO.
    """
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


def _obstacle(nodes: Sequence[Sequence[int]], device_type: str) -> str:
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
    nodes: Sequence[Sequence[int]],
    rank: int,
    backend: str,
    across_backend: str,
    policy: WaitPolicy,
    store: Store | None,
    mpi_comm: Any = None,
    kept: KeptMemory | None = None,
) -> Communicator:
    """One communicator over those of each node and those of equal local ranks. Collective.

    ``backend`` (gloo or mpi) moves small tensors, and tensors in a node that cannot share memory;
    ``across_backend`` those between nodes. In ``store``, which is still empty, ranks of a node meet
    to share memory; without it they do not; ``kept`` lends it. ``mpi_comm`` is mpi4py's
    communicator of all ranks.
    """
    peers = [sorted(ranks) for ranks in zip(*nodes, strict=True)]
    transport: Transport = (
        open_mpi_transport(mpi_comm, policy) if backend == "mpi" else open_gloo_transport(policy)
    )

    def over(backend: str, parts: Sequence[Sequence[int]]) -> Communicator:
        return (
            open_gloo_subgroup(parts, policy)
            if backend == "gloo"
            else open_mpi_subgroup(mpi_comm, parts, policy)
        )

    def open_node() -> Communicator:
        own = (
            _through_memory(nodes, rank, policy, PrefixStore("of node", store), None, 1)
            if store is not None
            else []
        )
        return own[0] if own else over(backend, nodes)

    in_node: Sequence[Communicator] = (
        _through_memory(nodes, rank, policy, store, kept) if store is not None else []
    )
    inward, outward = in_node or [over(backend, nodes), over(backend, nodes)]
    across = over(across_backend, peers)
    if rank == 0:
        names = type(inward).__name__, type(across).__name__
        _log.info(
            "%d nodes of %d ranks: %s in a node, %s between nodes.", len(nodes), len(peers), *names
        )
    return HierarchicalCommunicator(
        transport, inward, outward, across, peers, policy, open_node=open_node
    )


def _through_memory(
    nodes: Sequence[Sequence[int]],
    rank: int,
    policy: WaitPolicy,
    store: Store,
    kept: KeptMemory | None,
    count: int = 2,
) -> list[SharedMemoryCommunicator]:
    """One or two communicators over this rank's node in the same shared memory; empty if some
    node cannot share it.
    """
    number, members = next((number, ranks) for number, ranks in enumerate(nodes) if rank in ranks)
    bootstrap = StoreBootstrap(PrefixStore(f"node/{number}", store), members, rank, policy)
    first = open_shared_memory(bootstrap, policy, members=members, kept=kept)
    opened = [first]
    if count == 2 and first is not None:
        opened.append(open_shared_memory(first, policy, members=members, beside=first))
    all_ranks = range(sum(map(len, nodes)))
    exchange = StoreBootstrap(PrefixStore("all", store), all_ranks, rank, policy)
    if not all(exchange.all_gather_object(opened[-1] is not None)):
        return []
    return [comm for comm in opened if comm is not None]
