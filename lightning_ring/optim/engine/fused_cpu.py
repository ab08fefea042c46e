"""The fused way on the CPU: one compiled kernel to measure, one to move, each over all parameters."""

from __future__ import annotations

import ctypes
import functools
from array import array

import torch
from torch import Tensor

from lightning_ring.optim.engine import compiler
from lightning_ring.optim.engine.cpp_kernel import CHUNK, source
from lightning_ring.optim.engine.parameter_list import ParameterBatch, TensorKind
from lightning_ring.optim.engine.rule import Rule, StepNumbers
from lightning_ring.optim.engine.trace import measure_body, move_body


class FusedCpuRunner:
    """Runs a rule as C++, compiled at the first step for the dtypes at hand; uses torch's number of threads."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._chunks: dict[tuple[int, ...], Tensor] = {}
        self._pointers: tuple[ParameterBatch, Tensor] | None = None

    def waves(self, part: ParameterBatch) -> list[ParameterBatch]:
        return [part]

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        norms = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in part.grads]
        return torch.stack(norms).square().sum()

    def measure(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool) -> Tensor:
        chunks = self._chunks_of(part)
        sums = torch.empty(len(chunks), 3, dtype=torch.float64)
        scalars = self._scalars(measure_body(self._rule, deferred).scalars, part, numbers)
        self._call("measure", part, scalars, sums, deferred)
        by_row = torch.zeros(len(part.positions), 3, dtype=torch.float64)
        return by_row.index_add_(0, chunks[:, 0], sums).T

    def move(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool, keep: Tensor | None) -> None:
        assert keep is None, "on the CPU it is known whether to move"
        scalars = self._scalars(move_body(self._rule, deferred).scalars, part, numbers)
        self._call("move", part, scalars, None, deferred)
        torch.autograd.graph.increment_version([*part.weights, *part.mirrors])
        self._pointers = None

    def _call(self, name: str, part: ParameterBatch, scalars: Tensor, sums: Tensor | None, deferred: bool) -> None:
        chunks = self._chunks_of(part)
        library = compiler.load(_source(self._rule, part.kind, deferred))
        addresses = (chunks, self._pointers_of(part), scalars, sums)
        getattr(library, name)(
            ctypes.c_int64(len(chunks)),
            *(ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in addresses),
            ctypes.c_int(min(torch.get_num_threads(), max(1, len(chunks)))),
            torch_threads(),
        )

    def _scalars(self, names: tuple[str, ...], part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        """Shape [parameters, names], float64."""
        if not names:
            return torch.zeros(len(part.positions), 1, dtype=torch.float64)
        columns = torch.stack([numbers.on_device[name] for name in names], dim=1).cpu()
        return columns[part.positions].contiguous()

    def _pointers_of(self, part: ParameterBatch) -> Tensor:
        """Shape [parameters, weight + gradient + states (+ mirror)], int64; kept from `measure` to `move`."""
        if self._pointers is None or self._pointers[0] is not part:
            columns = [part.weights, part.grads, *zip(*part.states, strict=True)]
            columns += [part.mirrors] if part.mirrors else []
            addresses = array("q", [tensor.data_ptr() for column in columns for tensor in column])
            table = torch.frombuffer(addresses, dtype=torch.int64)  # sooner than torch.tensor of a list
            self._pointers = (part, table.view(len(columns), -1).T.contiguous())
        return self._pointers[1]

    def _chunks_of(self, part: ParameterBatch) -> Tensor:
        """Row, first element and number of elements of each chunk: shape [chunks, 3], int64."""
        sizes = tuple(weight.numel() for weight in part.weights)
        if sizes not in self._chunks:
            chunks = [
                (row, start, min(CHUNK, size - start))
                for row, size in enumerate(sizes)
                for start in range(0, size, CHUNK)
            ]
            self._chunks[sizes] = torch.tensor(chunks, dtype=torch.int64).reshape(-1, 3)
        return self._chunks[sizes]


@functools.cache
def torch_threads() -> ctypes.c_void_p:
    """Address of ``GOMP_parallel`` of the OpenMP that torch runs on, null where it has none.

    OpenMP's threads keep their cores busy for milliseconds after torch's last parallel operation, waiting for the next;
    threads of our own would share the cores with them. GNU's and LLVM's OpenMP both export this entry.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return ctypes.c_void_p(None)


_sources: dict[tuple[Rule, TensorKind, bool], str] = {}


def _source(rule: Rule, kind: TensorKind, deferred: bool) -> str:
    key = (rule, kind, deferred)
    if key not in _sources:
        _sources[key] = source(rule, kind.weight, kind.grad, kind.compute, kind.mirror, deferred)
    return _sources[key]
