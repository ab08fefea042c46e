"""Who is measured: every backend of ours that works here, and torch.distributed without us, as their peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

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
from lightning_ring.tools.bench.names import BACKENDS


class Collectives(Protocol):
    """The part of a `Communicator` that is measured."""

    @property
    def shard_index(self) -> int: ...

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def all_reduce_(self, tensor: Tensor) -> Any: ...

    def reduce_scatter_(self, flat: Tensor) -> Any: ...

    def all_gather_(self, flat: Tensor) -> Any: ...

    def close(self) -> None: ...


class PlainTorch:
    """torch.distributed's own collectives on its default group; lengths are multiples of the world size."""

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


@dataclass(frozen=True, slots=True)
class Backend:
    """A contender for tensors on ``device``; ``missing`` says why it cannot be opened here (an empty text: it can)."""

    device: str
    open: Callable[[Job, timedelta], Collectives]
    missing: Callable[[Job], str] = lambda job: ""


def _open_auto(job: Job, timeout: timedelta) -> Communicator:
    return open_communicator(job, "auto", torch.device("cpu"), timeout, stall_warning=timeout)


def _open_mpi(job: Job, timeout: timedelta) -> Communicator:
    return MPICommunicator(policy=WaitPolicy(timeout, job.check))


def _mpi_missing(job: Job) -> str:
    return "" if job.info.source == "mpi" else f"{job.info.source} started the ranks, not MPI"


def _open_over_torch(backend: str) -> Callable[[Job, timedelta], Communicator]:
    return lambda job, timeout: open_torch_communicator(backend, WaitPolicy(timeout, job.check))


_WAYS = {
    "auto": Backend("cpu", _open_auto),
    "mpi": Backend("cpu", _open_mpi, _mpi_missing),
    "gloo": Backend("cpu", _open_over_torch("gloo")),
    "nccl": Backend("cuda", _open_over_torch("nccl")),
    "torch-gloo": Backend("cpu", lambda job, timeout: PlainTorch()),
    "torch-nccl": Backend("cuda", lambda job, timeout: PlainTorch()),
}


def open_contenders(
    job: Job, device: torch.device, asked: Sequence[str], timeout: timedelta
) -> tuple[dict[str, Collectives], dict[str, str]]:
    """The backends ``asked`` for (none: all for this ``device`` that work here), and why others do not. Collective.

    Raises `ConfigurationError`: A backend was asked for that does not work here.
    """
    missing = {}
    for name in BACKENDS:
        if _WAYS[name].device != device.type:
            missing[name] = f"it moves {_WAYS[name].device} tensors, these ranks have {device.type}"
        elif reason := _WAYS[name].missing(job):
            missing[name] = reason
    there = [name for name in BACKENDS if name not in missing]
    for name in asked:
        if name in missing:
            raise ConfigurationError(f"{name} cannot be measured here: {missing[name]}. There are: {', '.join(there)}.")
    return {name: _WAYS[name].open(job, timeout) for name in asked or there}, missing
