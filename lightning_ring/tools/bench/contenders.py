"""The backends that are measured: those of lightning_ring that work here, and torch.distributed
by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ring.comm.backends.gloo import open_torch_communicator
from lightning_ring.comm.backends.mpi import MPICommunicator
from lightning_ring.comm.communicator import Communicator, shard
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job
from lightning_ring.tools.bench import BACKENDS


class PlainTorch:
    """torch.distributed's own collectives on its default group; lengths are multiples of the
    world size.
    """

    shard_index = property(lambda self: dist.get_rank())

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=device)

    def all_reduce_(self, tensor: Tensor) -> Any:
        return dist.all_reduce(tensor, async_op=True)

    def reduce_scatter_(self, flat: Tensor) -> Any:
        return dist.reduce_scatter_tensor(self._own(flat), flat, async_op=True)

    def all_gather_(self, flat: Tensor) -> Any:
        return dist.all_gather_into_tensor(flat, self._own(flat), async_op=True)

    def close(self) -> None:
        """The default group is the job's."""

    def _own(self, flat: Tensor) -> Tensor:
        return shard(flat, dist.get_world_size(), dist.get_rank())


Collectives = Communicator | PlainTorch


def _open(name: str, job: Job, timeout: timedelta) -> Collectives:
    policy = WaitPolicy(timeout, job.check)
    if name == "auto":
        return open_communicator(job, "auto", torch.device("cpu"), timeout, stall_warning=timeout)
    if name == "mpi":
        return MPICommunicator(policy=policy)
    return PlainTorch() if name.startswith("torch-") else open_torch_communicator(name, policy)


def open_contenders(
    job: Job, device: torch.device, asked: Sequence[str], timeout: timedelta
) -> tuple[dict[str, Collectives], dict[str, str]]:
    """The backends ``asked`` for (none: all for this ``device`` that work here), and why others do
    not. Collective.

    Raises `ConfigurationError`: a backend was asked for that does not work here.
    """
    missing = {}
    for name in BACKENDS:
        moves = "cuda" if name.endswith("nccl") else "cpu"
        if moves != device.type:
            missing[name] = f"it moves {moves} tensors, these ranks have {device.type}"
        elif name == "mpi" and job.info.source != "mpi":
            missing[name] = f"{job.info.source} started the ranks, not MPI"
    there = [name for name in BACKENDS if name not in missing]
    for name in asked:
        if name in missing:
            raise ConfigurationError(
                f"{name} cannot be measured here: {missing[name]}. There are: {', '.join(there)}."
            )
    return {name: _open(name, job, timeout) for name in asked or there}, missing
