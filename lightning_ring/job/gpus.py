"""Which GPU each rank takes, and whether ranks may share one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from lightning_ring.errors import RankDiscoveryError

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
SHARING_VERSION = (2, 30)  # of NCCL, the first that knows the variable


def shares_gpus(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the user has allowed several ranks on one GPU."""
    return (os.environ if environ is None else environ).get(SHARING, "0") not in ("", "0")


def nccl_version() -> tuple[int, ...]:
    """Of NVIDIA's NCCL in this torch; empty without it."""
    # RCCL numbers its own versions
    has_nccl = torch.distributed.is_nccl_available() and torch.version.hip is None
    return tuple(torch.cuda.nccl.version()) if has_nccl else ()


def pick_gpu(
    local_rank: int,
    local_size: int,
    device_count: int,
    visible: str | None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Index of the GPU for this rank, of the ``device_count`` that this process sees.

    ``visible`` is ``CUDA_VISIBLE_DEVICES``, for the error. A process that sees one GPU, because its
    launcher gave each rank its own, takes that one; whether two ranks were given the same one,
    `check_gpu_assignment` tells.
    """
    if local_rank < device_count:
        return local_rank
    if device_count == 1:  # a container or a cgroup hides the others, with or without that variable
        return 0
    if device_count and shares_gpus(environ):
        return local_rank % device_count
    raise RankDiscoveryError(
        f"Local rank {local_rank} (of {local_size} on this node) finds {device_count} GPUs "
        f"(CUDA_VISIBLE_DEVICES={visible if visible is not None else 'not set'}), and every rank "
        f"needs one of its own. Start at most {device_count} ranks on this node, make more GPUs "
        "visible, or use accelerator='cpu'."
    )


def check_gpu_assignment(
    gpus: Sequence[tuple[str, str]], nccl: tuple[int, ...], environ: Mapping[str, str] | None = None
) -> None:
    """Refuse two ranks on one GPU or partition of one (MIG), unless the user wants that and NCCL
    can.

    ``gpus[r]`` is rank r's host name, and the UUID of its GPU. ``nccl`` is NCCL's version.
    """
    owners: dict[tuple[str, str], int] = {}
    shared = next(
        (
            (owners[gpu], rank, gpu)
            for rank, gpu in enumerate(gpus)
            if owners.setdefault(gpu, rank) != rank
        ),
        None,
    )
    able = nccl >= SHARING_VERSION
    if shared is None or (able and shares_gpus(environ)):
        return
    first, second, (host, uuid) = shared
    version = ".".join(map(str, nccl)) or "not in this torch"
    if shares_gpus(environ):
        choice = (
            f"{SHARING} is set, but takes NCCL 2.30 or newer (here: {version}): install a newer "
            "torch."
        )
    elif able:
        choice = f"To share it all the same (tests, notebooks), set {SHARING}=1 on all ranks."
    else:
        choice = f"Sharing takes NCCL 2.30 or newer (here: {version}), and {SHARING}=1."
    raise RankDiscoveryError(
        f"Ranks {first} and {second} were given the same GPU, {uuid} on {host}; every rank needs "
        "one of its own. Start one rank per GPU, and let CUDA_VISIBLE_DEVICES show a rank either "
        f"all of its node's GPUs or only its own. {choice} Without GPUs: "
        "Trainer(accelerator='cpu')."
    )
