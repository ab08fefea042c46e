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
from lightning_ring.horovod.requests import Meta, Metas, Submission
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


class RoundPart(NamedTuple):
    """One tensor of a collective."""

    one: Agreed
    position: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.one.meta.shapes[self.position]

    @property
    def dtype(self) -> torch.dtype:
        return self.one.meta.dtypes[self.position]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Requests = Mapping[str, Submission]  # this rank's, by name; a rank that has joined may have none


class RoundPlan(NamedTuple):
    """Collectives, and the steps that run them: the names that each works on, and a function."""

    agreed: Sequence[Agreed]
    steps: Sequence[tuple[list[str], Callable[[Requests], None]]]


class Planner:
    """Cuts what the ranks have agreed on into steps. All ranks do so with the same collectives,
    in one order.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._buffer = torch.empty(0, dtype=torch.uint8)  # for fused tensors

    def plan(self, agreed: Sequence[Agreed]) -> RoundPlan:
        steps = []
        for batch in batches(agreed):
            names = dict.fromkeys(part.one.name for part in batch)
            run: Callable[[Requests], None] = functools.partial(
                _RUN[batch[0].one.meta.kind], batch[0], self._comm
            )
            if len(batch) > 1:
                memory = self._memory(sum(part.num_bytes for part in batch))
                run = FusedAllreduce(batch, memory, self._comm).run
            steps.append((list(names), run))
        return RoundPlan(agreed, steps)

    def _memory(self, num_bytes: int) -> Tensor:
        """Memory of the fused tensors of one step, which runs to its end before the next one
        begins.
        """
        if num_bytes > self._buffer.numel():
            rounded = 2 ** max(20, (num_bytes - 1).bit_length())
            self._buffer = self._comm.empty(rounded, torch.uint8, torch.device("cpu"))
        return self._buffer[:num_bytes]


def batches(agreed: Sequence[Agreed]) -> list[list[RoundPart]]:
    """Tensors that travel together: in short all-reduces of one dtype and operation, wherever they
    stand.
    """
    found = []
    filling: dict[tuple[object, ...], tuple[list[RoundPart] | None, int]] = {}
    for one in agreed:
        meta = one.meta
        for part in [RoundPart(one, index) for index in range(len(meta.shapes))]:
            if meta.kind != "allreduce" or part.num_bytes > FUSED_BYTES:
                found.append([part])
                continue
            key = part.dtype, meta.op, meta.prescale, meta.postscale, meta.device
            batch, before = filling.get(key, (None, 0))
            if batch is None or before + part.num_bytes > FUSION_BYTES:
                batch, before = [], 0
                found.append(batch)
            batch.append(part)
            filling[key] = batch, before + part.num_bytes
    return found


class FusedAllreduce:
    """All-reduces in one flat buffer. It is made once, and runs at every step."""

    def __init__(self, batch: Sequence[RoundPart], memory: Tensor, comm: Communicator) -> None:
        self._meta = batch[0].one.meta
        self._keys = [(part.one.name, part.position) for part in batch]
        self._comm = comm
        self._flat = memory.view(batch[0].dtype)
        pieces = self._flat.split([math.prod(part.shape) for part in batch])
        self._pieces = [piece.view(part.shape) for piece, part in zip(pieces, batch, strict=True)]

    def run(self, requests: Requests) -> None:
        own = [(requests[name], index) for name, index in self._keys if name in requests]
        pieces = self._pieces
        if len(own) < len(pieces):
            self._flat.zero_()  # this rank has joined
            keys = zip(pieces, self._keys, strict=True)
            pieces = [piece for piece, (name, _) in keys if name in requests]
        if own:
            _copy(pieces, [request.tensors[index] for request, index in own])
        _reduce(self._flat, self._meta, self._comm)
        _deliver(own, pieces)


def _allreduce(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index, meta = requests.get(part.one.name), part.position, part.one.meta
    if request is None:
        _reduce(torch.zeros(math.prod(part.shape), dtype=part.dtype), meta, comm)
        return
    tensor = request.tensors[index]
    if request.in_place and _is_plain(tensor):
        _reduce(tensor.detach().view(-1), meta, comm)
        request.result[index] = tensor
        return
    result = _copied(tensor)
    _reduce(result.view(-1), meta, comm)
    _hand_over(request, index, result)


def _reduce(flat: Tensor, meta: Meta, comm: Communicator) -> None:
    """Reduce 1-D ``flat`` in place."""
    _scale(flat, meta.prescale)
    if flat.numel() and comm.world_size > 1:
        comm.all_reduce_(flat, op=_OPS[meta.op], name="allreduce").wait()
    _scale(flat, meta.postscale)


def _scale(flat: Tensor, factor: float) -> None:
    """Multiply in place: integers by way of float64, 16-bit floats on the CPU by way of float32."""
    if factor != 1.0:
        wide = torch.float64 if not flat.is_floating_point() else torch.float32
        flat.copy_(flat.to(torch.promote_types(flat.dtype, wide)) * factor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a communicator can work in this memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_inference()


def _copied(tensor: Tensor) -> Tensor:
    """In memory of the host that nobody else uses."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _hand_over(request: Submission, index: int, result: Tensor) -> None:
    """Give the caller ``result``, which is memory that nobody else uses."""
    if request.tensors[index].is_cpu and not request.in_place:
        request.result[index] = result
    else:
        _deliver([(request, index)], [result])


def _deliver(own: Sequence[tuple[Submission, int]], results: list[Tensor]) -> None:
    """Copy ``results`` to where the callers want them. Tensors of GPUs travel through the host."""
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
    """Copy under the mode in which ``targets`` may be written."""
    inferred = any(target.is_inference() for target in targets)
    with torch.inference_mode() if inferred else nullcontext():
        torch._foreach_copy_(targets, sources)


def _allgather(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index = requests[part.one.name], part.position
    rows = [part.one.metas[rank].shapes[index][0] for rank in range(comm.world_size)]
    padded = torch.zeros((max(rows), *part.shape[1:]), dtype=part.dtype)
    padded[: rows[comm.rank]] = request.tensors[index].detach()
    everyones = [padded] * comm.world_size
    if padded.numel():
        everyones = comm.all_gather(padded, name="allgather")
    gathered = [one[:count] for one, count in zip(everyones, rows, strict=True)]
    _hand_over(request, index, torch.cat(gathered))


def _broadcast(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request = requests[part.one.name]
    buffer = _copied(request.tensors[0])
    if buffer.numel():
        comm.broadcast_(buffer, src=part.one.meta.root, name="broadcast").wait()
    _hand_over(request, 0, buffer)


def _alltoall(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request = requests[part.one.name]
    splits = list(request.meta.splits)
    mine = _copied(request.tensors[0])
    received = [part.one.metas[rank].splits[comm.rank] for rank in range(comm.world_size)]
    outputs = [mine.new_empty((count, *part.shape[1:])) for count in received]
    comm.all_to_all(list(mine[: sum(splits)].split(splits)), outputs, name="alltoall").wait()
    _hand_over(request, 0, torch.cat(outputs))
    request.result[0] = request.result[0], torch.tensor(received, dtype=torch.int32)


def _reducescatter(part: RoundPart, comm: Communicator, requests: Requests) -> None:
    request, index = requests[part.one.name], part.position
    whole = _copied(request.tensors[index])
    _reduce(whole.view(-1), part.one.meta, comm)
    _hand_over(request, index, whole.tensor_split(comm.world_size)[comm.rank].clone())


_RUN: Mapping[str, Callable[[RoundPart, Communicator, Requests], None]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
