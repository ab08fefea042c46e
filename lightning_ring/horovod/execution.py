"""Runs what the ranks have agreed on, in the order in which they agreed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.horovod.requests import Meta, Request, scaled
from lightning_ring.host.accelerator import gpu_module, is_gpu

FUSION_BYTES = 64 * 2**20
_OPS = {
    "Average": ReduceOp.AVG,
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}


@dataclass(slots=True)
class Agreed:
    """A collective that all ranks have submitted. ``own`` is `None` on a rank that has joined."""

    name: str
    metas: dict[int, Meta]
    own: Request | None

    @property
    def meta(self) -> Meta:
        return self.metas[min(self.metas)]


def run(agreed: Sequence[Agreed], comm: Communicator, finished: Callable[[Agreed], None]) -> None:
    """Run all of ``agreed`` over ``comm``. All-reduces of one dtype and operation that follow each other are one."""
    batch: list[Agreed] = []
    num_bytes = 0
    for one in agreed:
        meta = one.meta
        alike = bool(batch) and _alike(meta) == _alike(batch[0].meta)
        if batch and not (alike and num_bytes + _num_bytes(meta) <= FUSION_BYTES):
            _allreduce(batch, comm, finished)
            batch, num_bytes = [], 0
        if meta.kind == "allreduce":
            batch.append(one)
            num_bytes += _num_bytes(meta)
            continue
        assert one.own is not None or one.meta.kind == "barrier"
        if one.own is not None:
            _RUN[one.meta.kind](one.own, one, comm)
        finished(one)
    if batch:
        _allreduce(batch, comm, finished)


def _alike(meta: Meta) -> tuple[str, str, str]:
    return meta.kind, meta.dtype, meta.op


def _num_bytes(meta: Meta) -> int:
    return math.prod(meta.shape) * _dtype(meta).itemsize


def _dtype(meta: Meta) -> torch.dtype:
    found: torch.dtype = getattr(torch, meta.dtype)
    return found


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()


def _allreduce(batch: Sequence[Agreed], comm: Communicator, finished: Callable[[Agreed], None]) -> None:
    first = batch[0].meta
    parts = []
    for one in batch:
        if one.own is None:
            parts.append(torch.zeros(math.prod(one.meta.shape), dtype=_dtype(one.meta)))
        else:
            assert one.own.tensor is not None
            parts.append(scaled(_on_host(one.own.tensor), one.meta.prescale).reshape(-1))
    flat = torch.cat(parts) if len(parts) > 1 else parts[0].clone()
    if flat.numel():
        comm.all_reduce_(flat, op=_OPS[first.op], name="allreduce").wait()
    for one, part in zip(batch, flat.split([part.numel() for part in parts]), strict=True):
        if one.own is not None:
            _finish(one.own, scaled(part, one.meta.postscale).view(one.meta.shape))
        finished(one)


def _finish(request: Request, result: Tensor) -> None:
    """Put ``result`` where the caller wants it, in memory of its own. Tensors of GPUs travel through the host."""
    assert request.tensor is not None
    if request.output is not None:
        with torch.no_grad():
            request.output.copy_(result)
        request.result = request.output
    else:
        request.result = result.to(request.tensor.device, copy=True)
    if is_gpu(device := request.tensor.device):
        gpu_module(device).current_stream(device).synchronize()  # the caller has another stream


def _allgather(request: Request, agreed: Agreed, comm: Communicator) -> None:
    assert request.tensor is not None
    mine = _on_host(request.tensor)
    rows = [agreed.metas[rank].shape[0] for rank in range(comm.world_size)]
    rest = agreed.meta.shape[1:]
    padded = mine.new_zeros((max(rows), *rest))
    padded[: mine.shape[0]] = mine
    gathered = comm.all_gather(padded, name="allgather") if padded.numel() else [padded] * comm.world_size
    _finish(request, torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)]))


def _broadcast(request: Request, agreed: Agreed, comm: Communicator) -> None:
    assert request.tensor is not None
    buffer = _on_host(request.tensor).clone()
    if buffer.numel():
        comm.broadcast_(buffer, src=agreed.meta.root, name="broadcast").wait()
    _finish(request, buffer)


def _alltoall(request: Request, agreed: Agreed, comm: Communicator) -> None:
    assert request.tensor is not None
    mine = _on_host(request.tensor)
    received = [agreed.metas[rank].splits[comm.rank] for rank in range(comm.world_size)]
    inputs = [part.contiguous() for part in mine.split(list(request.meta.splits))]
    outputs = [mine.new_empty((count, *agreed.meta.shape[1:])) for count in received]
    comm.all_to_all(inputs, outputs, name="alltoall").wait()
    _finish(request, torch.cat(outputs))
    request.received_splits = torch.tensor(received, dtype=torch.int32)


def _reducescatter(request: Request, agreed: Agreed, comm: Communicator) -> None:
    assert request.tensor is not None
    whole = scaled(_on_host(request.tensor), agreed.meta.prescale).clone()
    if whole.numel():
        comm.all_reduce_(whole, op=_OPS[agreed.meta.op], name="reducescatter").wait()
    part = whole.tensor_split(comm.world_size)[comm.rank]
    _finish(request, scaled(part, agreed.meta.postscale))


def _barrier(request: Request, agreed: Agreed, comm: Communicator) -> None:
    """That all ranks have agreed is all."""


_RUN = {
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _barrier,
}
