"""The members of a job: on which node each rank runs, and which of its cores and GPUs it takes."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from lightning_ring.comm.store_bootstrap import PUBLISHED, publish, unpack
from lightning_ring.errors import RankDiscoveryError
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.host.cores import bound_cores, cgroup_quota
from lightning_ring.job.ranks import RankInfo

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING_VERSION = (2, 30)  # of NCCL, the first that knows the variable
_RDMA_DEVICES = Path("/sys/class/infiniband")  # or RoCE and the like

_log = logging.getLogger("lightning_ring")


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
    return JobMember(
        launch_rank,
        info.node_rank,
        socket.gethostname(),
        tuple(bound_cores()),
        cgroup_quota(),
        any(_RDMA_DEVICES.glob("*")),
        gpu_uuid(device) if is_gpu(device) else "",
    )


def exchange_members(own: JobMember, info: RankInfo, store: Store) -> list[JobMember]:
    """All members, by rank. Collective."""
    store = PrefixStore("members", store)
    store.set(str(info.rank), json.dumps(asdict(own)))
    if info.rank == 0:
        publish(store, list(map(str, range(info.world_size))))
    return decode_members(store.get(PUBLISHED))


def decode_members(published: bytes) -> list[JobMember]:
    found = unpack(published)
    return [JobMember(**member | {"cores": tuple(member["cores"])}) for member in found]


def nodes_of(members: Sequence[JobMember]) -> list[list[int]]:
    """The ranks of each node, in ascending order; the node of the lowest rank first."""
    nodes: dict[int, list[int]] = {}
    for rank, member in enumerate(members):
        nodes.setdefault(member.node, []).append(rank)
    return list(nodes.values())


def info_of(rank: int, members: Sequence[JobMember], source: str, generation: int) -> RankInfo:
    """The `RankInfo` of ``rank`` in a job of these ``members``."""
    nodes = nodes_of(members)
    node_rank, ranks = next(node for node in enumerate(nodes) if rank in node[1])
    return RankInfo(
        rank, len(members), ranks.index(rank), len(ranks), node_rank, len(nodes), source, generation
    )


# -- GPUs


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU, or of the partition that ``CUDA_VISIBLE_DEVICES`` names: the device that
    it shows may have the whole card's UUID.
    """
    entries = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    index = device.index or 0
    if index < len(entries) and entries[index].strip().startswith("MIG-"):
        return entries[index].strip()
    properties = gpu_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", f"{device} of {socket.gethostname()}"))


def shares_gpus() -> bool:
    """Whether the user has allowed several ranks on one GPU."""
    return os.environ.get(SHARING, "0") not in ("", "0")


def pick_gpu(local_rank: int, local_size: int, device_count: int) -> int:
    """Index of the GPU for this rank, of the ``device_count`` that this process sees.

    A process that sees one GPU takes it; `check_gpu_assignment` tells whether two ranks share it.
    """
    if local_rank < device_count:
        return local_rank
    if device_count == 1:
        return 0
    if device_count and shares_gpus():
        return local_rank % device_count
    raise RankDiscoveryError(
        f"Local rank {local_rank} (of {local_size} on this node) finds {device_count} GPUs "
        f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}), and every "
        f"rank needs one of its own. Start at most {device_count} ranks on this node, make more "
        "GPUs visible, or use accelerator='cpu'."
    )


def nccl_version() -> tuple[int, ...]:
    """Of NVIDIA's NCCL in this torch; empty without it."""
    # RCCL numbers its own versions
    has_nccl = torch.distributed.is_nccl_available() and torch.version.hip is None
    return tuple(torch.cuda.nccl.version()) if has_nccl else ()


def check_gpu_assignment(members: Sequence[JobMember], nccl: tuple[int, ...]) -> None:
    """Refuse two ranks on one GPU or partition (MIG), unless the user and NCCL allow it."""
    able = nccl >= SHARING_VERSION
    if able and shares_gpus():
        return
    owners: dict[tuple[str, str], int] = {}
    for rank, member in enumerate(members):
        first = owners.setdefault((member.host, member.gpu), rank)
        if first != rank:
            break
    else:
        return
    version = ".".join(map(str, nccl)) or "not in this torch"
    if shares_gpus():
        choice = (
            f"{SHARING} is set, but takes NCCL 2.30 or newer (here: {version}): install a newer "
            "torch."
        )
    elif able:
        choice = f"To share it all the same (tests, notebooks), set {SHARING}=1 on all ranks."
    else:
        choice = f"Sharing takes NCCL 2.30 or newer (here: {version}), and {SHARING}=1."
    raise RankDiscoveryError(
        f"Ranks {first} and {rank} were given the same GPU, {member.gpu} on {member.host}; every "
        "rank needs one of its own. Start one rank per GPU, and let CUDA_VISIBLE_DEVICES show a "
        f"rank either all of its node's GPUs or only its own. {choice} Without GPUs: "
        "Trainer(accelerator='cpu')."
    )


# -- cores


def fit_threads(info: RankInfo, members: Sequence[JobMember]) -> None:
    """Give this rank's share of its node's cores to torch, and log it once, unless the user chose:
    by OMP_NUM_THREADS, MKL_NUM_THREADS or `torch.set_num_threads`.
    """
    own = members[info.rank]
    node = [member for member in members if member.node == own.node]
    share = num_threads(own, node)
    before = torch.get_num_threads()
    chosen = is_chosen(before, len(own.cores))
    if not chosen and before != share:
        torch.set_num_threads(share)
    if info.local_rank == 0:
        report_threads(node, torch.get_num_threads(), chosen, log_fit=info.rank == 0)


def num_threads(own: JobMember, node: Sequence[JobMember]) -> int:
    """This rank's share of its ``node``'s cores, at least 1.

    Ranks bound to cores of their own keep those; others divide the cores that they share, or what a
    container's quota leaves of them.
    """
    return max(1, min(len(own.cores), _num_usable(node) // len(node)))


def is_chosen(threads: int, num_cores: int) -> bool:
    """Whether the user chose torch's ``threads``: by default they are the processors, or half of
    them with two hardware threads a core.
    """
    if "OMP_NUM_THREADS" in os.environ or "MKL_NUM_THREADS" in os.environ:
        return True
    processors = os.cpu_count() or 1
    return threads not in (num_cores, num_cores // 2, processors, processors // 2)


def report_threads(node: Sequence[JobMember], threads: int, chosen: bool, *, log_fit: bool) -> None:
    """Log that ``threads`` a rank fit the cores of a ``node``, else a warning with advice."""
    ranks, there, usable = len(node), os.cpu_count() or 1, _num_usable(node)
    together = {core for member in node for core in member.cores}
    tightest = min(len(member.cores) for member in node)
    bound = ranks > 1 and any(set(member.cores) != together for member in node)
    share = max(1, there // ranks)
    if bound and (threads > tightest or (len(together) < there and tightest < share)):
        _log.warning(
            f"The launcher bound each of the {ranks} ranks on this node to {tightest} of its "
            f"{there} cores, for {threads} thread(s) a rank. Start them with `mpirun --bind-to "
            f"none` or `ringrun`, or give each more cores (`--map-by slot:PE={share}`)."
        )
    elif ranks * threads > usable and threads > 1:
        _log.warning(
            f"{ranks} ranks with {threads} threads each share the {usable} core(s) of this node: "
            f"they will wait for each other. Set OMP_NUM_THREADS={max(1, usable // ranks)}, or "
            "leave it unset."
        )
    elif log_fit:
        reason = "as OMP_NUM_THREADS or the script asks" if chosen else "their share of the cores"
        _log.info(
            f"{ranks} ranks on this node, {usable} cores: {threads} thread(s) a rank, {reason}."
        )


def _num_usable(node: Sequence[JobMember]) -> int:
    together = {core for member in node for core in member.cores}
    return max(1, int(min(len(together), node[0].quota)))
