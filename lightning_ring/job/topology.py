"""Which ranks share a node, whether that is made use of, and over what the ranks of different nodes talk."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch.distributed import PrefixStore, Store

from lightning_ring.comm.backends.gloo import open_gloo_subgroup, open_gloo_transport
from lightning_ring.comm.backends.shared_memory.communicator import SharedMemoryCommunicator, open_shared_memory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.hierarchical import HierarchicalCommunicator
from lightning_ring.comm.ring_communicator import Transport
from lightning_ring.comm.store_bootstrap import StoreBootstrap
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.job.ranks import RankInfo

_FABRIC = Path("/sys/class/infiniband")

_log = logging.getLogger("lightning_ring")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank runs: the number of its node, and whether that has a network adapter for RDMA."""

    node: int
    fabric: bool


def exchange_places(info: RankInfo, store: Store) -> list[Place]:
    """Every rank's place, by rank. Collective."""
    mine = Place(info.node_rank, has_fabric())
    store.set(f"place/{info.rank}", json.dumps(asdict(mine)))
    return [Place(**json.loads(store.get(f"place/{rank}"))) for rank in range(info.world_size)]


def has_fabric(devices: Path = _FABRIC) -> bool:
    """Whether this host has InfiniBand, RoCE or the like."""
    return devices.is_dir() and any(devices.iterdir())


def carrier_between_nodes(places: Sequence[Place]) -> str:
    """What moves CPU tensors between nodes, where MPI started the ranks: ``"gloo"`` or ``"mpi"``.

    Over TCP Gloo is the faster one (``benchmarks/network.py``). It cannot use a fabric, which MPI libraries can.
    """
    return "mpi" if all(place.fabric for place in places) else "gloo"


def nodes_of(places: Sequence[Place]) -> list[list[int]]:
    """The ranks on each node, in ascending order."""
    return [
        [rank for rank, place in enumerate(places) if place.node == node] for node in sorted({p.node for p in places})
    ]


def is_hierarchical(topology: str, nodes: Sequence[Sequence[int]], device_type: str, rank: int = 0) -> bool:
    """What ``topology`` comes to for ranks on ``nodes``; for ``"auto"`` rank 0 says at INFO why it stays flat.

    Raises:
        ConfigurationError: ``"hierarchical"`` cannot work; the message is the same on every rank.
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
            f"{size} (ranks {', '.join(map(str, ranks))})" for size, ranks in zip(sizes, nodes, strict=True)
        )
        return f"the nodes hold different numbers of ranks: {shown}"
    return "no two ranks share a node" if sizes[0] == 1 else ""


def open_hierarchical(
    nodes: Sequence[Sequence[int]], rank: int, transport: str, carrier: str, patience: WaitPolicy, store: Store | None
) -> Communicator:
    """Communicators over the ranks of each node and over those with the same place on it, as one. Collective.

    ``transport``, ``"gloo"`` or ``"mpi"``, moves what is small, and ``carrier`` tensors between nodes. In a node they
    move through shared memory, for which the ranks meet in ``store``, still empty; without it, or where some ranks
    share no memory, over ``transport``.
    """
    peers = [sorted(ranks) for ranks in zip(*nodes, strict=True)]
    everybody: Transport
    across: Communicator
    if transport == "mpi":
        from lightning_ring.comm.backends.mpi import open_mpi_transport  # imports mpi4py, which starts MPI

        everybody = open_mpi_transport(None, patience)
    else:
        everybody = open_gloo_transport(patience)
    lanes: Sequence[Communicator] = _through_memory(nodes, rank, patience, store) if store is not None else []
    if not lanes:
        lanes = [_over(transport, nodes, patience), _over(transport, nodes, patience)]
    inward, outward = lanes
    across = _over(carrier, peers, patience)
    if rank == 0:
        in_node, between = type(inward).__name__, type(across).__name__
        _log.info("%d nodes of %d ranks: %s in a node, %s between nodes.", len(nodes), len(peers), in_node, between)
    return HierarchicalCommunicator(everybody, inward, outward, across, peers, patience)


def _over(backend: str, parts: Sequence[Sequence[int]], patience: WaitPolicy) -> Communicator:
    if backend == "gloo":
        return open_gloo_subgroup(parts, patience)
    from lightning_ring.comm.backends.mpi import open_mpi_subgroup

    return open_mpi_subgroup(parts, patience)


def _through_memory(
    nodes: Sequence[Sequence[int]], rank: int, patience: WaitPolicy, store: Store
) -> list[SharedMemoryCommunicator]:
    """Two communicators over this rank's node in the same shared memory; none if there is a node that cannot."""
    number, members = next((number, ranks) for number, ranks in enumerate(nodes) if rank in ranks)
    bootstrap = StoreBootstrap(PrefixStore(f"node/{number}", store), members, rank, patience)
    first = open_shared_memory(bootstrap, patience, members=members)
    second = open_shared_memory(first, patience, members=members, beside=first) if first is not None else None
    everybody = range(sum(map(len, nodes)))
    exchange = StoreBootstrap(PrefixStore("all", store), everybody, rank, patience)
    if not all(exchange.all_gather_object(second is not None)):
        return []
    assert first is not None
    assert second is not None
    return [first, second]
