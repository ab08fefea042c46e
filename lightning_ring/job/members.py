"""The members of a job: on which node each rank runs, and what it may use there."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.host.cores import bound_cores, cgroup_quota
from lightning_ring.job.ranks import RankInfo

_RDMA_DEVICES = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class JobMember:
    """One rank of a job."""

    launch_rank: int  # by the launcher's count; it stays when a job goes on with fewer processes
    node: int  # as `RankInfo.node_rank`
    host: str = ""
    cores: tuple[int, ...] = ()  # that it is bound to
    quota: float = float("inf")  # of a container: cores at a time
    rdma: bool = False  # whether the host has a network adapter for RDMA
    gpu: str = ""  # UUID of its GPU, or of a partition (MIG) that is the rank's own


def own_member(info: RankInfo, launch_rank: int, device: torch.device) -> JobMember:
    """This process as a member."""
    gpu = gpu_uuid(device) if is_gpu(device) else ""
    return JobMember(
        launch_rank,
        info.node_rank,
        socket.gethostname(),
        tuple(bound_cores()),
        cgroup_quota(),
        has_rdma(),
        gpu,
    )


def gpu_uuid(device: torch.device, visible: str | None = None) -> str:
    """The UUID of a GPU. ``visible`` is ``CUDA_VISIBLE_DEVICES``, by default this process's.

    A partition is named by that variable alone: the device that it shows may have the whole card's
    UUID.
    """
    entries = (os.environ.get("CUDA_VISIBLE_DEVICES", "") if visible is None else visible).split(
        ","
    )
    index = device.index or 0
    if index < len(entries) and entries[index].strip().startswith("MIG-"):
        return entries[index].strip()
    properties = gpu_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", f"{device} of {socket.gethostname()}"))


def exchange_members(own: JobMember, info: RankInfo, store: Store) -> list[JobMember]:
    """All members, by rank. Collective."""
    store = PrefixStore("members", store)
    store.set(str(info.rank), json.dumps(asdict(own)))
    found = [json.loads(store.get(str(rank))) for rank in range(info.world_size)]
    return [JobMember(**member | {"cores": tuple(member["cores"])}) for member in found]


def has_rdma(devices: Path = _RDMA_DEVICES) -> bool:
    """Whether this host has InfiniBand, RoCE or the like."""
    return devices.is_dir() and any(devices.iterdir())


def nodes_of(members: Sequence[JobMember]) -> list[list[int]]:
    """The ranks of each node, in ascending order; the node of the lowest rank first."""
    nodes = dict.fromkeys(member.node for member in members)
    return [[rank for rank, member in enumerate(members) if member.node == node] for node in nodes]


def info_of(rank: int, members: Sequence[JobMember], source: str, generation: int) -> RankInfo:
    """The `RankInfo` of ``rank`` in a job of these ``members``."""
    nodes = nodes_of(members)
    node_rank = next(number for number, ranks in enumerate(nodes) if rank in ranks)
    ranks = nodes[node_rank]
    return RankInfo(
        rank, len(members), ranks.index(rank), len(ranks), node_rank, len(nodes), source, generation
    )
