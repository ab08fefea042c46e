"""`Training`: what `distribute` returns."""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sized
from types import TracebackType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.errors import ConfigurationError
from lightning_ring.job.job import Job
from lightning_ring.job.ranks import RankInfo
from lightning_ring.loops.replicas import Replicas

T = TypeVar("T")
log = logging.getLogger("lightning_ring")


class Training(Replicas):
    """What `distribute` returns: one module that several ranks train, until `close`.

    Also a context manager. All ranks call its methods in one order, unless a method says otherwise.

    Attributes:
        rank, world_size, local_rank: Of this process.
        device: Where the module is.
        communicator: What all ranks exchange tensors through; `None` in a single process.
    """

    def __init__(
        self, info: RankInfo, job: Job, device: torch.device, *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.rank, self.world_size, self.local_rank = info.rank, info.world_size, info.local_rank
        self.device = device
        self._job = job
        self.communicator = self.comm
        self._closed = False

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """This rank's part of ``dataset``, for a `DataLoader`. Call ``set_epoch`` before each
        epoch.

        Not collective. If the samples do not divide by the ranks, some are repeated, or dropped
        with ``drop_last``; rank 0 warns of it.
        """
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, self.world_size, self.rank, shuffle, seed, drop_last
        )
        num_samples = len(cast(Sized, dataset))
        padded = sampler.total_size - num_samples
        if padded and self.rank == 0:
            what = "repeated" if padded > 0 else "dropped"
            log.warning(
                "%d samples do not divide by %d ranks: each epoch %d of them are %s, so that all "
                "ranks have equally many.",
                num_samples,
                self.world_size,
                abs(padded),
                what,
            )
        return sampler

    def all_reduce(self, tensor: Tensor, op: str = "mean") -> Tensor:
        """Reduce ``tensor`` over the ranks, in new memory, by "mean", "sum", "min", "max" or
        "product"."""
        names = {"mean" if one is ReduceOp.AVG else one.value: one for one in ReduceOp}
        if op not in names:
            raise ConfigurationError(
                f"all_reduce got op={op!r}, expected one of {', '.join(map(repr, names))}."
            )
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.comm is None:
            return reduced
        if op == "mean" and not (reduced.is_floating_point() or reduced.is_complex()):
            reduced = reduced.double()
        self.comm.all_reduce_(reduced, op=names[op], name="all_reduce of the loop").wait()
        return reduced

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's ``tensor`` (same shape everywhere), by rank, in a new first dimension."""
        if self.comm is None:
            return tensor.detach().clone().unsqueeze(0)
        return torch.stack(
            self.comm.all_gather(tensor.detach().contiguous(), name="all_gather of the loop")
        )

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s picklable ``obj``, on every rank."""
        if self.comm is None:
            return obj
        return self.comm.broadcast_object(obj, src=src, name="broadcast of the loop")

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self.comm is not None:
            self.comm.barrier(name="of the loop")

    def state_dict(self) -> dict[str, Any]:
        """State of the algorithm, such as a compressor's residuals; on rank 0 for all ranks."""
        return self.algorithm.state_dict() if self.comm is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, the same on every rank. Warns where that is impossible."""
        problem = self.comm is not None and self.algorithm.load_state_dict(state)
        if problem and self.rank == 0:
            log.warning("%s", problem)

    def close(self) -> None:
        """End the training: remove hooks and write the timeline. Twice is fine."""
        self._end(wait=True)

    def _end(self, *, wait: bool) -> None:
        if self._closed:
            return
        self._closed = True
        open_trainings.remove(self)
        self.remove(wait=wait)
        if self.timeline is not None and not wait:
            self.timeline.abandon()
        elif self.timeline is not None and not open_trainings:
            self.timeline.finish()

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        if self._job.watch is not None and isinstance(error, Exception):
            self._job.watch.report(error)  # the other ranks must not wait while this one cleans up
        self._end(wait=False)


open_trainings: list[Training] = []


@atexit.register
def _close_forgotten() -> None:
    for training in list(open_trainings):
        training.close()
