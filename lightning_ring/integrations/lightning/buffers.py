"""Broadcast of rank 0's buffers to the other ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_ring.comm.communicator import Communicator, as_bytes
from lightning_ring.comm.replicate import broadcast_buffers, broadcast_tensors
from lightning_ring.integrations.lightning.whole_weights import OwnCallback
from lightning_ring.options import BroadcastBuffers


class BufferBroadcast:
    """Broadcasts a module's buffers as ``RingStrategy(broadcast_buffers=)`` (``when``) asks.

    With ``"epoch"``, statistics of normalization layers may differ between ranks within an epoch:
    no training step reads them. Other buffers (a queue of features, a codebook) are compared before
    training batches 1, 2, 4, 8, ... of the fit, counted from 0. Those that differ are broadcast
    before every training step from then on, with a warning.
    """

    def __init__(self, when: BroadcastBuffers) -> None:
        self._when = when
        self._num_batches = 0
        self._every_step: set[str] = set()

    @property
    def state(self) -> tuple[int, set[str]]:
        """What the ranks have to agree on."""
        return self._num_batches, set(self._every_step)

    @state.setter
    def state(self, state: tuple[int, set[str]]) -> None:
        self._num_batches, self._every_step = state

    def sends_before(self, batch_idx: int, accumulate: int = 1) -> bool:
        find = self._when == "epoch" and self._num_batches.bit_count() == 1
        every = bool(self._every_step) and batch_idx % accumulate == 0
        return find or every or self._when == "step" or (self._when == "epoch" and batch_idx == 0)

    def before_batch(
        self, module: nn.Module, comm: Communicator, batch_idx: int, accumulate: int = 1
    ) -> None:
        """Before the training step of batch ``batch_idx`` of its epoch; collective.

        Under gradient accumulation, once for ``accumulate`` batches, as DDP does.
        """
        if self._when == "epoch" and comm.world_size > 1:
            if self._num_batches.bit_count() == 1:
                self._find_different(module, comm)
            self._num_batches += 1
        if self._when == "step" or (self._when == "epoch" and batch_idx == 0):
            broadcast_buffers(module, comm)
        elif self._every_step and batch_idx % accumulate == 0:
            broadcast_tensors(
                [buffer for name, buffer in module.named_buffers() if name in self._every_step],
                comm,
            )

    def before_reading(self, module: nn.Module, comm: Communicator) -> None:
        """Before an evaluation or a checkpoint reads all buffers. Collective."""
        if self._when != "start":
            broadcast_buffers(module, comm)

    def _find_different(self, module: nn.Module, comm: Communicator) -> None:
        digests = {
            name: _digest(buffer)
            for name, buffer in _read_in_training(module)
            if name not in self._every_step
        }
        by_rank = comm.all_gather_object(digests, name="digests of buffers")
        names = sorted(set().union(*by_rank))
        different = [name for name in names if len({digests.get(name) for digests in by_rank}) > 1]
        if not different:
            return
        self._every_step.update(different)
        late = f" In {self._num_batches - 1} training step(s) before, they may have differed." * (
            self._num_batches > 1
        )
        rank_zero_warn(
            f"lightning_ring: training changes the buffer(s) {', '.join(different)} differently on "
            "each rank. From now on rank 0's values replace the others' before every training "
            f"step, as DDP does.{late} RingStrategy(broadcast_buffers='step') does so for all "
            "buffers from the first step; with broadcast_buffers='start' each rank keeps its own."
        )


def broadcast_after_swap(trainer: pl.Trainer, broadcast: Callable[[], None]) -> None:
    """Broadcast again after all other callbacks, if one may replace buffers of the module.

    Lightning's `WeightAveraging` does so in ``on_validation_epoch_start``, after the strategy's
    ``on_validation_start``: each rank would evaluate its own BatchNorm statistics.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    plain = pl.Callback.on_validation_epoch_start
    if any(type(one).on_validation_epoch_start is not plain for one in callbacks):
        callbacks.append(OwnCallback(broadcast, ["on_validation_epoch_start"]))


def _read_in_training(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All buffers, by name, except the running statistics of normalization layers."""
    for prefix, part in module.named_modules():
        statistics = (
            ("running_mean", "running_var", "num_batches_tracked")
            if isinstance(part, _NormBase)
            else ()
        )
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in statistics:
                yield name, buffer


def _digest(buffer: Tensor) -> bytes:
    data = as_bytes(buffer.cpu().contiguous())
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).digest()
