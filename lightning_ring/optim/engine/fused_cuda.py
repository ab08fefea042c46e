"""The fused way on CUDA: three Triton launches over all parameters, nothing that waits for the device."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, TensorKind, send
from lightning_ring.optim.engine.rule import Rule, StepNumbers
from lightning_ring.optim.engine.trace import measure_body, move_body
from lightning_ring.optim.engine.triton_kernel import BLOCK, CHUNK, compile_module


@functools.cache
def triton_is_here() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


class FusedCudaRunner:
    """Runs a rule as Triton programs, each on a chunk of one tensor that it finds through a table of addresses.

    The tables are sent to the device when they change (gradients tend to come back at the same addresses) from pinned
    memory, without waiting. Under a CUDA graph that copy is part of the graph, which is why the memory is kept.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._chunks: dict[Any, tuple[Tensor, Tensor]] = {}
        self._addresses: dict[TensorKind, tuple[list[list[int]], Tensor, bool]] = {}
        self._captured: list[Tensor] = []

    def waves(self, part: ParameterBatch) -> list[ParameterBatch]:
        return [part]

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        norms = torch._foreach_norm(part.grads, 2, torch.float64)
        return torch.stack(norms).square().sum()

    def measure(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool) -> Tensor:
        module = _module(self._rule, part.kind, deferred)
        chunks, first_chunk = self._chunks_of(part)
        rows = len(part.positions)
        by_row = torch.zeros(3, rows, dtype=torch.float64, device=part.kind.device)
        if not len(chunks):
            return by_row
        sums = torch.zeros(len(chunks), 3, dtype=torch.float64, device=part.kind.device)
        pointers, aligned = self._pointers_of(part)
        scalars = _table(measure_body(self._rule, deferred).scalars, part, numbers)
        with _on(part.kind.device):
            module["measure"][(len(chunks),)](
                chunks, pointers, scalars, sums, ALIGNED=aligned, CHUNK=CHUNK, BLOCK=BLOCK, num_warps=8
            )
            module["add_up"][(rows,)](first_chunk, sums, by_row, rows, BLOCK=128, num_warps=4)
        return by_row

    def move(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool, keep: Tensor | None) -> None:
        module = _module(self._rule, part.kind, deferred)
        chunks, _ = self._chunks_of(part)
        if len(chunks):
            pointers, aligned = self._pointers_of(part)
            scalars = _table(move_body(self._rule, deferred).scalars, part, numbers)
            flag = chunks if keep is None else keep.to(part.kind.device, torch.int64)
            with _on(part.kind.device):
                module["move"][(len(chunks),)](
                    chunks,
                    pointers,
                    scalars,
                    flag,
                    ALIGNED=aligned,
                    CONDITIONAL=keep is not None,
                    CHUNK=CHUNK,
                    BLOCK=BLOCK,
                    num_warps=8,
                )
        torch.autograd.graph.increment_version([*part.weights, *part.mirrors])

    def _pointers_of(self, part: ParameterBatch) -> tuple[Tensor, bool]:
        """Addresses, shape [parameters, weight + gradient + states (+ mirror)]; whether all are multiples of 16."""
        columns = [part.weights, part.grads, *zip(*part.states, strict=True)]
        columns += [part.mirrors] if part.mirrors else []
        addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
        known = self._addresses.get(part.kind)
        if known is None or known[0] != addresses:
            aligned = all(address % 16 == 0 for column in addresses for address in column)
            table = self._to_device(torch.tensor(addresses).T.contiguous(), part.kind.device)
            known = self._addresses[part.kind] = (addresses, table, aligned)
        return known[1], known[2]

    def _chunks_of(self, part: ParameterBatch) -> tuple[Tensor, Tensor]:
        """Row, start and size of each chunk, shape [chunks, 3]; first chunk of each row, shape [parameters + 1]."""
        sizes = tuple(weight.numel() for weight in part.weights)
        key = (part.kind.device, sizes)
        if key not in self._chunks:
            chunks, first = [], [0]
            for row, size in enumerate(sizes):
                chunks += [(row, start, min(CHUNK, size - start)) for start in range(0, size, CHUNK)]
                first.append(len(chunks))
            tables = torch.tensor(chunks, dtype=torch.int64).reshape(-1, 3), torch.tensor(first)
            self._chunks[key] = tuple(self._to_device(table, part.kind.device) for table in tables)  # type: ignore[assignment]
        return self._chunks[key]

    def _to_device(self, table: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return table
        pinned = table.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(pinned)
        return pinned.to(device, non_blocking=True)


def _table(names: tuple[str, ...], part: ParameterBatch, numbers: StepNumbers) -> Tensor:
    """Scalars by parameter of the part, shape [parameters, names], float64, on the part's device."""
    device = part.kind.device
    if not names:
        return torch.zeros(len(part.positions), 1, dtype=torch.float64, device=device)
    table = torch.stack([numbers.on_device[name] for name in names], dim=1)
    if len(part.positions) != len(table):
        table = table.index_select(0, _index(tuple(part.positions), table.device))
    return table.to(device)


@functools.lru_cache(maxsize=64)
def _index(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return send(torch.tensor(positions), device)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _module(rule: Rule, kind: TensorKind, deferred: bool) -> dict[str, Any]:
    return compile_module(rule, kind.weight, kind.grad, kind.compute, kind.mirror, deferred)
