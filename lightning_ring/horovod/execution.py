"""Runs what the ranks have agreed on, in the order in which they agreed."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.horovod.adasum import adasum_
from lightning_ring.horovod.requests import GRADIENTS, Meta, Metas, Submission, scaled
from lightning_ring.host.accelerator import gpu_module, is_gpu

FUSION_BYTES = 64 * 2**20  # of one collective
# a tensor up to this is copied beside others; a longer one costs less where it is
FUSED_BYTES = 2**20
_OPS = {
    "Average": ReduceOp.AVG,
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}


class Agreed(NamedTuple):
    """A collective that all ranks have submitted. A rank that has joined is not in ``metas``."""

    name: str
    metas: Metas

    @property
    def meta(self) -> Meta:
        return self.metas[min(self.metas)]


Requests = Mapping[str, Submission]  # this rank's, by name; a rank that has joined may have none
Step = tuple[list[str], Callable[[Requests], None]]
"""Names of collectives that run as one, and what runs them."""


class Planner:
    """Cuts what the ranks have agreed on into steps. All ranks do so with the same collectives,
    in one order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buffer = torch.empty(0, dtype=torch.uint8)  # for fused tensors

    def steps(self, agreed: Sequence[Agreed]) -> list[Step]:
        return [([one.name for one in batch], self._runner(batch)) for batch in _batches(agreed)]

    def _runner(self, batch: Sequence[Agreed]) -> Callable[[Requests], None]:
        if len(batch) > 1:
            return FusedAllreduce(batch, self._memory(sum(map(_num_bytes, batch))), self._comm).run
        return functools.partial(_RUN[batch[0].meta.kind], batch[0], self._comm)

    def _memory(self, num_bytes: int) -> Tensor:
        """Memory of the fused tensors of one step, which runs to its end before the next one
        begins.
        """
        if num_bytes > self._buffer.numel():
            rounded = 2 ** max(20, (num_bytes - 1).bit_length())
            self._buffer = self._comm.empty(rounded, torch.uint8, torch.device("cpu"))
        return self._buffer[:num_bytes]


def _batches(agreed: Sequence[Agreed]) -> list[list[Agreed]]:
    """Collectives that run as one: short all-reduces of one dtype and operation, wherever they
    stand.
    """
    batches = []
    filling: dict[tuple[object, ...], tuple[list[Agreed] | None, int]] = {}
    for one in agreed:
        meta, num_bytes = one.meta, _num_bytes(one)
        if meta.kind != "allreduce" or num_bytes > FUSED_BYTES:
            batches.append([one])
            continue
        key = meta.dtype, meta.op, meta.prescale, meta.postscale, meta.device
        batch, before = filling.get(key, (None, 0))
        if batch is None or before + num_bytes > FUSION_BYTES:
            batch, before = [], 0
            batches.append(batch)
        batch.append(one)
        filling[key] = batch, before + num_bytes
    return batches


def _num_bytes(one: Agreed) -> int:
    return math.prod(one.meta.shape) * one.meta.dtype.itemsize


class FusedAllreduce:
    """All-reduces in one flat buffer. It is made once, and runs at every step."""

    def __init__(self, batch: Sequence[Agreed], memory: Tensor, comm: Communicator) -> None:
        self._meta = batch[0].meta
        self._names = [one.name for one in batch]
        self._comm = comm
        self._flat = memory.view(self._meta.dtype)
        self._numels = [math.prod(one.meta.shape) for one in batch]
        parts = self._flat.split(self._numels)
        self._parts = [part.view(one.meta.shape) for part, one in zip(parts, batch, strict=True)]

    def run(self, requests: Requests) -> None:
        own = [requests.get(name) for name in self._names]
        found = [request for request in own if request is not None]
        parts = self._parts
        if len(found) < len(own):
            self._flat.zero_()  # this rank has joined
            parts = [part for part, request in zip(parts, own, strict=True) if request is not None]
        tensors = [_given(request) for request in found]
        _copy(parts, tensors)
        _reduce(self._flat, self._meta, self._comm, self._numels)
        _deliver(found, parts)


def _allreduce(one: Agreed, comm: Communicator, requests: Requests) -> None:
    request, meta = requests.get(one.name), one.meta
    if request is None:
        _reduce(torch.zeros(math.prod(meta.shape), dtype=meta.dtype), meta, comm)
        return
    if (
        request.output is not None
        and request.output is request.tensor
        and _is_plain(request.output)
    ):
        _reduce(request.output.detach().view(-1), meta, comm)
        request.result = request.output
        return
    result = _given(request).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    _reduce(result.view(-1), meta, comm)
    _hand_over(request, result)


def _reduce(flat: Tensor, meta: Meta, comm: Communicator, numels: Sequence[int] = ()) -> None:
    """Reduce 1-D ``flat`` in place. Tensors of ``numels`` follow each other in it; by default
    there is one.
    """
    if meta.prescale != 1.0:
        flat.copy_(scaled(flat, meta.prescale))
    if meta.op == "Adasum":
        adasum_(flat, numels or [flat.numel()], comm)
    elif flat.numel() and comm.world_size > 1:
        comm.all_reduce_(flat, op=_OPS[meta.op], name="allreduce").wait()
    if meta.postscale != 1.0:
        flat.copy_(scaled(flat, meta.postscale))


def _is_plain(tensor: Tensor) -> bool:
    """Whether a communicator can work in this memory."""
    odd = tensor.is_conj() or tensor.is_neg() or tensor.is_inference()
    return tensor.is_cpu and tensor.is_contiguous() and not odd


def _given(request: Submission) -> Tensor:
    assert request.tensor is not None
    return request.tensor


def _on_host(request: Submission) -> Tensor:
    return _given(request).detach().cpu().contiguous()


def _hand_over(request: Submission, result: Tensor) -> None:
    """Give the caller ``result``, which is memory that nobody else uses."""
    if request.output is None and _given(request).is_cpu:
        request.result = result
    else:
        _deliver([request], [result])


def _deliver(requests: list[Submission], results: list[Tensor]) -> None:
    """Copy ``results`` to where the callers want them. Tensors of GPUs travel through the host."""
    targets = [
        torch.empty(result.shape, dtype=result.dtype, device=_given(request).device)
        if request.output is None
        else request.output
        for request, result in zip(requests, results, strict=True)
    ]
    _copy(targets, results)
    for request, target in zip(requests, targets, strict=True):
        request.result = target
    if targets and is_gpu(device := targets[0].device):
        gpu_module(device).current_stream(device).synchronize()  # the caller has another stream


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy under the mode in which ``targets`` may be written."""
    if not targets:
        return
    with (
        torch.inference_mode()
        if any(target.is_inference() for target in targets)
        else nullcontext()
    ):
        torch._foreach_copy_(targets, sources)


def _allgather(one: Agreed, comm: Communicator, requests: Requests) -> None:
    request = requests[one.name]
    mine = _on_host(request)
    rows = [one.metas[rank].shape[0] for rank in range(comm.world_size)]
    padded = mine.new_zeros((max(rows), *one.meta.shape[1:]))
    padded[: mine.shape[0]] = mine
    gathered = (
        comm.all_gather(padded, name="allgather") if padded.numel() else [padded] * comm.world_size
    )
    _hand_over(
        request, torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])
    )


def _broadcast(one: Agreed, comm: Communicator, requests: Requests) -> None:
    request = requests[one.name]
    buffer = _on_host(request).clone()
    if buffer.numel():
        comm.broadcast_(buffer, src=one.meta.root, name="broadcast").wait()
    _hand_over(request, buffer)


def _alltoall(one: Agreed, comm: Communicator, requests: Requests) -> None:
    request = requests[one.name]
    mine = _on_host(request)
    received = [one.metas[rank].splits[comm.rank] for rank in range(comm.world_size)]
    inputs = list(mine[: sum(request.meta.splits)].split(list(request.meta.splits)))
    outputs = [mine.new_empty((count, *one.meta.shape[1:])) for count in received]
    comm.all_to_all(inputs, outputs, name="alltoall").wait()
    _hand_over(request, torch.cat(outputs))
    request.result = request.result, torch.tensor(received, dtype=torch.int32)


def _reducescatter(one: Agreed, comm: Communicator, requests: Requests) -> None:
    request = requests[one.name]
    whole = _on_host(request).clone()
    _reduce(whole.view(-1), one.meta, comm)
    _hand_over(request, whole.tensor_split(comm.world_size)[comm.rank].clone())


def _nothing_more(one: Agreed, comm: Communicator, requests: Requests) -> None:
    """That all ranks have agreed is all."""


_RUN: Mapping[str, Callable[[Agreed, Communicator, Requests], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
    "barrier": _nothing_more,
    "meeting": _nothing_more,
    GRADIENTS: _nothing_more,
}
