"""Runs what the ranks have agreed on, in the order in which they agreed."""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.horovod.requests import Meta, Metas, Submission
from lightning_ring.host.accelerator import gpu_module, is_gpu

FUSION_BYTES = 63 * 2**20  # of one collective, which may be longer by `FUSED_BYTES`
# a tensor up to this is copied beside others
FUSED_BYTES = 2**20
OPS = {
    "Average": ReduceOp.AVG,
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}

# collectives that all ranks have submitted, by name; a rank that has joined has no meta
Agreed = Mapping[str, Metas]
Requests = Mapping[str, Submission]  # this rank's, by name; none after `join`
Run = Callable[[Requests], None]


class RoundPart(NamedTuple):
    """One tensor of a collective."""

    name: str
    position: int
    metas: Metas
    meta: Meta
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class RoundPlan(NamedTuple):
    """Collectives and their steps: the names that each works on, and a function."""

    agreed: Agreed
    steps: Sequence[tuple[set[str], Run]]


class Planner:
    """Cuts collectives into steps, the same on all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def plan(self, agreed: Agreed) -> RoundPlan:
        steps = [({part.name for part in batch}, self._run(batch)) for batch in batches(agreed)]
        return RoundPlan(agreed, steps)

    def _run(self, batch: Sequence[RoundPart]) -> Run:
        if len(batch) == 1:
            return functools.partial(_RUN[batch[0].meta.kind], batch[0], self._comm)
        num_bytes = sum(part.num_bytes for part in batch)
        if num_bytes > self._buffer.numel():
            rounded = 2 ** max(20, (num_bytes - 1).bit_length())
            self._buffer = self._comm.empty(rounded, torch.uint8, torch.device("cpu"))
        return _fused_allreduce(batch, self._buffer[:num_bytes], self._comm)


def batches(agreed: Agreed) -> list[list[RoundPart]]:
    """Tensors that travel together: short all-reduces of one dtype and operation."""
    found: defaultdict[object, list[RoundPart]] = defaultdict(list)
    num_bytes: Counter[object] = Counter()
    for name, metas in agreed.items():
        meta = metas[min(metas)]
        for position, (shape, dtype) in enumerate(zip(meta.shapes, meta.dtypes, strict=True)):
            part = RoundPart(name, position, metas, meta, shape, dtype)
            key: object = name, position
            if meta.kind == "allreduce" and part.num_bytes <= FUSED_BYTES:
                kind = dtype, meta.op, meta.prescale, meta.postscale, meta.device
                num_bytes[kind] += part.num_bytes
                key = kind, num_bytes[kind] // FUSION_BYTES
            found[key].append(part)
    return list(found.values())


def _fused_allreduce(batch: Sequence[RoundPart], memory: Tensor, comm: Communicator) -> Run:
    """All-reduces in one flat buffer, built once and run at every step."""
    meta = batch[0].meta
    keys = [(part.name, part.position) for part in batch]
    flat = memory.view(batch[0].dtype)
    split = flat.split([math.prod(part.shape) for part in batch])
    views = [piece.view(part.shape) for piece, part in zip(split, batch, strict=True)]

    def run(requests: Requests) -> None:
        own, pieces = [(requests[name], index) for name, index in keys if name in requests], views
        if len(own) < len(views):
            flat.zero_()  # this rank has joined
            pieces = [view for view, (name, _) in zip(views, keys, strict=True) if name in requests]
        if own:
            _copy(pieces, [request.tensors[index] for request, index in own])
        _reduce(flat, meta, comm)
        _deliver(own, pieces)

    return run


def _allreduce(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index = requests.get(part.name), part.position
    if request is None:
        _reduce(torch.zeros(math.prod(part.shape), dtype=part.dtype), part.meta, comm)
        return
    tensor = request.tensors[index]
    # a communicator can work in this memory
    plain = tensor.is_cpu and tensor.is_contiguous() and not tensor.is_inference()
    if request.in_place and plain:
        _reduce(tensor.detach().view(-1), part.meta, comm)
        request.result[index] = tensor
        return
    result = _copied(tensor)
    _reduce(result.view(-1), part.meta, comm)
    _hand_over(request, index, result)


def _reduce(flat: Tensor, meta: Meta, comm: Communicator) -> None:
    _scale(flat, meta.prescale)
    if flat.numel() and comm.world_size > 1:
        comm.all_reduce_(flat, op=OPS[meta.op], name="allreduce").wait()
    _scale(flat, meta.postscale)


def _scale(flat: Tensor, factor: float) -> None:
    """Multiply in place: integers by way of float64, 16-bit floats on the CPU by way of float32."""
    if factor != 1.0:
        wide = torch.float64 if not flat.is_floating_point() else torch.float32
        flat.copy_(flat.to(torch.promote_types(flat.dtype, wide)) * factor)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _hand_over(request: Submission, index: int, result: Tensor) -> None:
    if request.tensors[index].is_cpu and not request.in_place:
        request.result[index] = result
    else:
        _deliver([(request, index)], [result])


def _deliver(own: Sequence[tuple[Submission, int]], results: list[Tensor]) -> None:
    """Copy ``results`` to the callers. Tensors of GPUs travel through the host."""
    if not own:
        return
    targets = []
    for (request, index), result in zip(own, results, strict=True):
        target = request.tensors[index]
        if not request.in_place:
            target = torch.empty(result.shape, dtype=result.dtype, device=target.device)
        request.result[index] = target
        targets.append(target)
    _copy(targets, results)
    if is_gpu(device := targets[0].device):
        gpu_module(device).current_stream(device).synchronize()  # the caller has another stream


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    inferred = any(target.is_inference() for target in targets)
    with torch.inference_mode() if inferred else nullcontext():
        torch._foreach_copy_(targets, sources)


def _allgather(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index = requests[part.name], part.position
    rows = [part.metas[rank].shapes[index][0] for rank in range(comm.world_size)]
    padded = torch.zeros((max(rows), *part.shape[1:]), dtype=part.dtype)
    padded[: rows[comm.rank]] = request.tensors[index].detach()
    everyones = comm.all_gather(padded, name="allgather")
    gathered = [one[:count] for one, count in zip(everyones, rows, strict=True)]
    _hand_over(request, index, torch.cat(gathered))


def _broadcast(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index = requests[part.name], part.position
    buffer = _copied(request.tensors[index])
    comm.broadcast_(buffer, src=part.meta.root, name="broadcast").wait()
    _hand_over(request, index, buffer)


def _alltoall(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request = requests[part.name]
    splits = request.meta.splits
    mine = _copied(request.tensors[0])
    received = [part.metas[rank].splits[comm.rank] for rank in range(comm.world_size)]
    found = mine.new_empty((sum(received), *part.shape[1:]))
    inputs, outputs = mine[: sum(splits)].split(splits), found.split(received)
    comm.all_to_all(inputs, outputs, name="alltoall").wait()
    _hand_over(request, 0, found)
    request.result[0] = request.result[0], torch.tensor(received, dtype=torch.int32)


def _reducescatter(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index = requests[part.name], part.position
    whole = _copied(request.tensors[index])
    _reduce(whole.view(-1), part.meta, comm)
    _hand_over(request, index, whole.tensor_split(comm.world_size)[comm.rank].clone())


_RUN: Mapping[str, Callable[[RoundPart, Communicator, Requests], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
