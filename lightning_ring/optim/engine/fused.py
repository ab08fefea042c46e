"""The fused runners: one compiled kernel to measure and one to move, each over all parameters."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine import compiler, cpp_kernel, triton_kernel
from lightning_ring.optim.engine.parameter_list import ParameterBatch, TensorKind, send
from lightning_ring.optim.engine.plain import PlainRunner
from lightning_ring.optim.engine.rule import Rule, StepNumbers
from lightning_ring.optim.engine.trace import cached, measure_body, move_body


class FusedRunner(PlainRunner):
    """The tables through which the kernels find their tensors; each call works on a chunk of one
    tensor.

    Tables are made when they change (gradients tend to come back at the same addresses). They
    travel to a GPU from pinned memory, without waiting. A CUDA graph repeats that copy, which is
    why it keeps the memory.
    """

    chunk: int  # elements

    def __init__(self, rule: type[Rule]) -> None:
        super().__init__(rule)
        self._chunks: dict[Any, tuple[Tensor, Tensor]] = {}
        self._addresses: dict[TensorKind, tuple[list[list[int]], Tensor]] = {}
        self._captured: list[Tensor] = []

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        return torch.stack(torch._foreach_norm(part.grads, 2, torch.float64)).square().sum()

    def _tables_of(self, part: ParameterBatch) -> tuple[Tensor, Tensor, Tensor]:
        """The tables of `_chunks_of` and of `_pointers_of`."""
        if part.tables is None:
            part.tables = (*self._chunks_of(part), self._pointers_of(part))
        return part.tables

    def _pointers_of(self, part: ParameterBatch) -> Tensor:
        """Addresses of weight, gradient, states (and mirror), and 1 where all of them are multiples
        of 16.

        Shape [parameters, tensors + 1].
        """
        addresses = [[tensor.data_ptr() for tensor in column] for column in part.columns()]
        known = self._addresses.get(part.kind)
        if known is None or known[0] != addresses:
            aligned = [
                int(all(address % 16 == 0 for address in row))
                for row in zip(*addresses, strict=True)
            ]
            table = torch.tensor([*addresses, aligned]).T.contiguous()
            known = self._addresses[part.kind] = (
                addresses,
                self._to_device(table, part.kind.device),
            )
        return known[1]

    def _chunks_of(self, part: ParameterBatch) -> tuple[Tensor, Tensor]:
        """Row, start and size of each chunk, shape [chunks, 3]; first chunk of each row, shape
        [parameters + 1].
        """
        sizes = tuple(weight.numel() for weight in part.weights)
        key = (part.kind.device, sizes)
        if key not in self._chunks:
            step = self.chunk
            chunks = [
                (row, at, min(step, size - at))
                for row, size in enumerate(sizes)
                for at in range(0, size, step)
            ]
            first = accumulate((-(-size // step) for size in sizes), initial=0)
            tables = (
                torch.tensor(chunks, dtype=torch.int64).reshape(-1, 3),
                torch.tensor(list(first)),
            )
            self._chunks[key] = (
                self._to_device(tables[0], key[0]),
                self._to_device(tables[1], key[0]),
            )
        return self._chunks[key]

    def _to_device(self, table: Tensor, device: torch.device) -> Tensor:
        if device.type != "cuda":
            return table
        pinned = table.pin_memory()
        if torch.cuda.is_current_stream_capturing():
            self._captured.append(pinned)
        return pinned.to(device, non_blocking=True)


class FusedCpuRunner(FusedRunner):
    """Runs a rule as C++, compiled at the first step for the dtypes at hand; uses torch's number
    of threads.
    """

    chunk = cpp_kernel.CHUNK

    def measure(self, part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        chunks, *_ = self._tables_of(part)
        sums = torch.empty(len(chunks), 2, dtype=torch.float64)
        self._call("measure", part, _table(measure_body(self._rule).scalars, part, numbers), sums)
        by_row = torch.zeros(len(part.positions), 2, dtype=torch.float64)
        return by_row.index_add_(0, chunks[:, 0], sums).T

    def move(self, part: ParameterBatch, numbers: StepNumbers) -> None:
        self._call("move", part, _table(move_body(self._rule).scalars, part, numbers), None)
        torch.autograd.graph.increment_version([*part.weights, *part.mirrors])

    def _call(self, name: str, part: ParameterBatch, scalars: Tensor, sums: Tensor | None) -> None:
        chunks, _, pointers = self._tables_of(part)
        library = compiler.load(_source(self._rule, part.kind))
        addresses = (chunks, pointers, scalars, sums)
        getattr(library, name)(
            ctypes.c_int64(len(chunks)),
            *(
                ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
                for tensor in addresses
            ),
            ctypes.c_int(min(torch.get_num_threads(), max(1, len(chunks)))),
            _torch_threads(),
        )


class FusedCudaRunner(FusedRunner):
    """Runs a rule as three Triton launches, nothing of which waits for the device."""

    chunk = triton_kernel.CHUNK

    def measure(self, part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        device, rows = part.kind.device, len(part.positions)
        chunks, first_chunk, pointers = self._tables_of(part)
        by_row = torch.zeros(2, rows, dtype=torch.float64, device=device)
        if not len(chunks):
            return by_row
        sums = torch.zeros(len(chunks), 2, dtype=torch.float64, device=device)
        scalars = _table(measure_body(self._rule).scalars, part, numbers)
        module, sizes = (
            _module(self._rule, part.kind),
            {"CHUNK": self.chunk, "BLOCK": triton_kernel.BLOCK},
        )
        with _on(device):
            module["measure"][(len(chunks),)](chunks, pointers, scalars, sums, num_warps=8, **sizes)
            module["add_up"][(rows,)](first_chunk, sums, by_row, rows, BLOCK=128, num_warps=4)
        return by_row

    def move(self, part: ParameterBatch, numbers: StepNumbers) -> None:
        chunks, _, pointers = self._tables_of(part)
        if len(chunks):
            scalars = _table(move_body(self._rule).scalars, part, numbers)
            sizes = {"CHUNK": self.chunk, "BLOCK": triton_kernel.BLOCK}
            launch = _module(self._rule, part.kind)["move"][(len(chunks),)]
            with _on(part.kind.device):
                launch(chunks, pointers, scalars, num_warps=8, **sizes)
        torch.autograd.graph.increment_version([*part.weights, *part.mirrors])


def _table(names: tuple[str, ...], part: ParameterBatch, numbers: StepNumbers) -> Tensor:
    """Scalars by parameter of the part, shape [parameters, names], float64, on the part's
    device.
    """
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


_source = cached(cpp_kernel.source)
_module = cached(triton_kernel.compile_module)


@functools.cache
def triton_is_here() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _torch_threads() -> ctypes.c_void_p:
    """Address of ``GOMP_parallel`` of the OpenMP that torch runs on, null where it has none.

    OpenMP's threads keep their cores busy for milliseconds after torch's last parallel operation,
    waiting for the next; threads of our own would share the cores with them. GNU's and LLVM's
    OpenMP both export this entry.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except AttributeError:
        return ctypes.c_void_p(None)
