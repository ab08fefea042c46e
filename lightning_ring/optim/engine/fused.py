"""The fused way: Triton kernels over all parameters of one kind, nothing of which waits for the
device.
"""

from __future__ import annotations

import contextlib
import functools
from itertools import accumulate
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import send
from lightning_ring.optim.engine.parameter_list import ParameterBatch, TensorKind
from lightning_ring.optim.engine.rule import Rule
from lightning_ring.optim.engine.sent_tables import SentTables

CHUNK = 1 << 14  # elements of one program
NUM_WARPS = 8
# Bytes that a program works on at a time of the widest tensor it loads: 16 for each of its threads,
# which is one load. With 32, LAMB needs 106 to 118 registers to measure, and two programs fit a
# multiprocessor of an A100 or H100; with 16 it needs 48, and five fit.
BLOCK_BYTES = 16 * 32 * NUM_WARPS


class FusedRun:
    """One step of the parameters of ``part``.

    The kernels find their tensors through tables; each program works on a chunk of one tensor.
    Tables are made when they change: gradients tend to come back at the same addresses.

    Args:
        groups: The group of each parameter.
        hyper: What `hyperparameters` of the optimizer returns, a row for each group.
        step: Steps of each parameter, this one included.
        ratios: Where the trust ratios are written.
    """

    def __init__(
        self,
        rule: type[Rule],
        part: ParameterBatch,
        tables: SentTables,
        groups: Tensor,
        hyper: Tensor,
        step: Tensor | None,
        clip: Tensor | None,
        ratios: Tensor,
    ) -> None:
        self._rule = rule
        self._part = part
        self._ratios = ratios
        self._chunks, self._first_chunk = chunks_of(part, tables)
        self._pointers = pointers_of(part, tables)
        self._rows, device = len(part.weights), part.kind.device
        shape = self._rows, kernels().COLUMNS
        self._numbers = torch.empty(shape, dtype=torch.float64, device=device)
        self.sums = torch.empty(2, self._rows, dtype=torch.float64, device=device)
        numbers = groups, hyper, *_steps(step, device), clip, self._numbers
        self._launch(f"{rule.kernels}_scalars", self._rows, *numbers, num_warps=1)

    def measure(self) -> None:
        count, rows = len(self._chunks), self._rows
        sums = torch.empty(count, 2, dtype=torch.float64, device=self.sums.device)
        self._sweep(sums)
        places = self._first_chunk, sums, self.sums
        self._launch("add_up", rows, *places, rows, BLOCK=128, num_warps=4)

    def move(self, *, measured: bool) -> Tensor:
        """Measure unless that is done, and move; returns the trust ratios."""
        if not measured:
            self.measure()
        rows, numbers = self._rows, (self.sums, self._numbers, self._ratios)
        self._launch(f"{self._rule.kernels}_rates", rows, *numbers, rows, num_warps=1)
        self._sweep(None)
        torch.autograd.graph.increment_version([*self._part.weights, *self._part.mirrors])
        return self._ratios

    def _launch(self, kernel: str, programs: int, *arguments: Any, **constants: Any) -> None:
        device = self.sums.device
        if not programs:
            return
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            getattr(kernels(), kernel)[(programs,)](*arguments, **constants)

    def _sweep(self, sums: Tensor | None) -> None:
        """Measure into ``sums``, or move."""
        constants = constants_of(self._rule, self._part.kind, move=sums is None)
        tables = self._chunks, self._pointers, self._numbers
        self._launch("sweep", len(self._chunks), *tables, sums, num_warps=NUM_WARPS, **constants)


def chunks_of(part: ParameterBatch, tables: SentTables) -> tuple[Tensor, Tensor]:
    """Row, start and size of each chunk, shape [chunks, 3]; first chunk of each row, shape
    [parameters + 1].
    """
    sizes = tuple(map(Tensor.numel, part.weights))
    device = part.kind.device

    def chunks() -> Tensor:
        rows = [
            (row, at, min(CHUNK, size - at))
            for row, size in enumerate(sizes)
            for at in range(0, size, CHUNK)
        ]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)

    def first() -> Tensor:
        counts = (-(-size // CHUNK) for size in sizes)
        return torch.tensor(list(accumulate(counts, initial=0)))

    return (
        tables.get(("chunks", device, sizes), None, device, chunks),
        tables.get(("first", device, sizes), None, device, first),
    )


def pointers_of(part: ParameterBatch, tables: SentTables) -> Tensor:
    """Addresses of weight, gradient, states (and mirror), and 1 where all of them are multiples of
    16.

    Shape [parameters, tensors + 1].
    """
    # Memory may change without a word to Python (`param.data = ...`), so that each step asks.
    columns = part.columns() + ([part.mirrors] if part.mirrors else [])
    addresses = [list(map(Tensor.data_ptr, column)) for column in columns]

    def make() -> Tensor:
        rows = zip(*addresses, strict=True)
        aligned = [int(all(address % 16 == 0 for address in row)) for row in rows]
        return torch.tensor([*addresses, aligned]).T.contiguous()

    return tables.get(part.kind, addresses, part.kind.device, make)


def constants_of(rule: type[Rule], kind: TensorKind, move: bool) -> dict[str, Any]:
    """The constants of `kernels.sweep`."""
    loaded = [kind.weight, kind.grad]
    if move or rule.keeps_directions:
        loaded.append(kind.compute)  # of the states
    types = {
        "WEIGHT": kind.weight,
        "GRAD": kind.grad,
        "COMPUTE": kind.compute,
        "MIRROR": kind.mirror,
    }
    return {
        name: dtype and getattr(kernels().tl, str(dtype)[6:]) for name, dtype in types.items()
    } | {
        "LAMB": rule.kernels == "lamb",
        "MOVE": move,
        "CHUNK": CHUNK,
        "BLOCK": BLOCK_BYTES // max(dtype.itemsize for dtype in loaded),
    }


def _steps(step: Tensor | None, device: torch.device) -> tuple[Tensor | None, float | None]:
    """``step`` on ``device``, or the one number that it holds, which needs no copy."""
    if step is None:
        return None, None
    if step.device.type == "cpu":
        low, high = (bound.item() for bound in step.aminmax())
        if low == high:
            return None, low
    return send(step, device), None


@functools.cache
def triton_is_here() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def kernels() -> ModuleType:
    """The kernels, which import Triton."""
    from lightning_ring.optim.engine import kernels

    return kernels
