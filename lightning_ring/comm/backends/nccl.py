"""NCCL through torch.distributed: work is queued on the GPU's streams, and waiting for it does not stop the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ring.comm.calls import check_all_to_all, describe
from lightning_ring.comm.communicator import Communicator, ReduceOp, Work, as_bytes, shard
from lightning_ring.comm.padded_rows import PaddedRows
from lightning_ring.comm.ring import check_reducible, divides_first, finish_, prepare_
from lightning_ring.comm.waiting import transport_error
from lightning_ring.errors import ConfigurationError, RingError

_OPS = {op: getattr(dist.ReduceOp, op.name) for op in ReduceOp}


class NCCLCommunicator(Communicator):
    """CUDA tensors over an NCCL ``group`` of its own; CPU tensors, objects and barriers go over ``host``.

    `Work.wait` orders the current stream after the collective. A collective that does not finish is ended by NCCL's
    watchdog in torch, after the timeout the group was made with. Shards that NCCL cannot split evenly (length not a
    multiple of the world size) travel through a padded copy. One rank alone uses NCCL too: that is how its cost is
    measured on one GPU (``force_communication=True``).
    """

    def __init__(self, group: dist.ProcessGroup, host: Communicator) -> None:
        self._group = group
        self._host = host
        self._closed = False
        self.rank = host.rank
        self.world_size = host.world_size

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if not self._serves(tensor):
            return self._host.all_reduce_(tensor, op=op, name=name)
        flat, native = self._prepared(tensor.detach().view(-1), op)
        return self._start(
            describe("all_reduce", op.value, flat.dtype, f"{flat.numel()} elements", name=name),
            lambda: dist.all_reduce(flat, op=native, group=self._group, async_op=True),
            lambda: self._divide(tensor.detach(), op),
        )

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if not self._serves(flat):
            return self._host.reduce_scatter_(flat, op=op, name=name)
        flat = flat.detach()
        own = shard(flat, self.world_size, self.rank)
        rows = PaddedRows(flat, self.world_size)
        rows.load()
        sent, native = self._prepared(rows.flat, op)
        target = shard(sent, self.world_size, self.rank)

        def finish() -> None:
            rows.store(self.rank)
            self._divide(own, op)

        return self._start(
            describe("reduce_scatter", op.value, flat.dtype, f"{flat.numel()} elements", name=name),
            lambda: dist.reduce_scatter_tensor(target, sent, op=native, group=self._group, async_op=True),
            finish,
        )

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        if not self._serves(flat):
            return self._host.all_gather_(flat, name=name)
        flat = flat.detach()
        rows = PaddedRows(flat, self.world_size)
        rows.load(self.rank)
        sent = as_bytes(rows.flat)
        own = shard(sent, self.world_size, self.rank)
        return self._start(
            describe("all_gather", flat.dtype, f"{flat.numel()} elements", name=name),
            lambda: dist.all_gather_into_tensor(sent, own, group=self._group, async_op=True),
            rows.store,
        )

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = "") -> Work:
        if not any(map(self._serves, (*inputs, *outputs))):
            return self._host.all_to_all(inputs, outputs, name=name)
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sources, targets = [as_bytes(tensor) for tensor in inputs], [as_bytes(tensor) for tensor in outputs]
        return self._start(what, lambda: dist.all_to_all(targets, sources, group=self._group, async_op=True))

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        if not self._serves(tensor):
            return self._host.broadcast_(tensor, src=src, name=name)
        source = dist.get_global_rank(self._group, src)
        return self._start(
            describe("broadcast", f"from rank {src}", tensor.dtype, f"{tensor.numel()} elements", name=name),
            lambda: dist.broadcast(as_bytes(tensor), source, group=self._group, async_op=True),
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._host.close()

    def _serves(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def _start(self, what: str, launch: Callable[[], Any], finish: Callable[[], None] = lambda: None) -> Work:
        try:
            return StreamWork(what, launch(), finish)
        except RingError:
            raise
        except RuntimeError as error:
            raise transport_error(what, error) from error

    def _prepared(self, flat: Tensor, op: ReduceOp) -> tuple[Tensor, Any]:
        """``flat`` as a dtype that NCCL reduces, and the operation it is asked for; `_divide` does what is missing.

        NCCL's AVG multiplies by 1/N in the tensor's own type: in 16 bits that factor is off by up to 0.2 % where N is
        no power of two, for all gradients alike. `prepare_` divides them in float32 before they are summed.
        """
        check_reducible(flat, op)
        if flat.dtype is torch.int16 or (flat.is_complex() and op is ReduceOp.PRODUCT):
            raise ConfigurationError(f"NCCL cannot reduce {flat.dtype} by {op.name}; convert the tensor first.")
        prepare_(flat, op, self.world_size)
        averages = flat.is_floating_point() and not divides_first(flat.dtype)
        native = _OPS[op] if op is not ReduceOp.AVG or averages else dist.ReduceOp.SUM
        if flat.is_complex():
            return torch.view_as_real(flat).view(-1), native
        return flat.view(torch.uint8) if flat.dtype is torch.bool else flat, native

    def _divide(self, reduced: Tensor, op: ReduceOp) -> None:
        if not reduced.is_floating_point():
            finish_(reduced, op, self.world_size)


@dataclass(slots=True, eq=False)
class StreamWork:
    """A collective on the GPU's streams. ``finish`` is queued behind it, once, by the first `wait`."""

    _description: str
    _work: Any
    _finish: Callable[[], None] | None

    def order_current_stream(self) -> None:
        """Have the current stream go on after the collective; unlike `wait` this queues nothing behind it."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise transport_error(self._description, error) from error

    def wait(self) -> None:
        self.order_current_stream()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def done(self) -> bool:
        return bool(self._work.is_completed())
