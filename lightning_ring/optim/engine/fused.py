"""The fused runner: one Triton kernel to measure and one to move, each over all parameters."""

from __future__ import annotations

import contextlib
import functools
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import send
from lightning_ring.optim.engine import triton_kernel
from lightning_ring.optim.engine.parameter_list import ParameterBatch, ParameterList, TensorKind
from lightning_ring.optim.engine.plain import PlainRunner
from lightning_ring.optim.engine.rule import Rule, StepNumbers
from lightning_ring.optim.engine.sent_tables import SentTables
from lightning_ring.optim.engine.trace import (
    cached,
    measure_body,
    move_body,
    number_names,
    scalars_body,
)


class FusedRunner(PlainRunner):
    """Runs a rule as five Triton launches, nothing of which waits for the device.

    The kernels find their tensors through tables; each program works on a chunk of one tensor.
    Tables are made when they change: gradients tend to come back at the same addresses.
    """

    chunk = triton_kernel.CHUNK  # elements

    def __init__(self, rule: type[Rule]) -> None:
        super().__init__(rule)
        self._kept = SentTables()

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
        # Memory may change without a word to Python (`param.data = ...`), so that each step asks.
        addresses = [list(map(Tensor.data_ptr, column)) for column in part.columns()]

        def make() -> Tensor:
            rows = zip(*addresses, strict=True)
            aligned = [int(all(address % 16 == 0 for address in row)) for row in rows]
            return torch.tensor([*addresses, aligned]).T.contiguous()

        return self._kept.get(part.kind, addresses, part.kind.device, make)

    def _chunks_of(self, part: ParameterBatch) -> tuple[Tensor, Tensor]:
        """Row, start and size of each chunk, shape [chunks, 3]; first chunk of each row, shape
        [parameters + 1].
        """
        sizes = tuple(map(Tensor.numel, part.weights))
        device = part.kind.device

        def chunks() -> Tensor:
            rows = [
                (row, at, min(self.chunk, size - at))
                for row, size in enumerate(sizes)
                for at in range(0, size, self.chunk)
            ]
            return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)

        def first() -> Tensor:
            counts = (-(-size // self.chunk) for size in sizes)
            return torch.tensor(list(accumulate(counts, initial=0)))

        return (
            self._kept.get(("chunks", device, sizes), None, device, chunks),
            self._kept.get(("first", device, sizes), None, device, first),
        )

    def _table(self, part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        """The `number_names` of each parameter of the part, shape [parameters, names], float64, on
        the part's device.
        """
        device = part.kind.device
        table = numbers.table(number_names(self._rule))
        if len(part.positions) != len(table):
            positions, place = tuple(part.positions), table.device
            rows = self._kept.get((positions, place), None, place, lambda: torch.tensor(positions))
            table = table.index_select(0, rows)
        return table.to(device)

    def numbers(
        self,
        kind: TensorKind,
        hyperparameters: list[dict[str, Any]],
        listed: ParameterList,
        step: Tensor | None,
        clip: Tensor | None,
        ratios: Tensor,
    ) -> StepNumbers:
        """The scalars of a step whose parameters are all on one device, see `step_scalars`; the
        trust ratios are to be written to ``ratios``.
        """
        names, device = scalars_body(self._rule).scalars, listed.device
        hyper = listed.hyper_table([[group[n] for n in names] for group in hyperparameters])
        count = len(listed.params)
        table = torch.empty(
            count, len(number_names(self._rule)), dtype=torch.float64, device=device
        )
        steps, same_step = _steps(step, device)
        groups, module = listed.groups_on(device), _module(self._rule, kind)
        with _on(device):
            launch = module["scalars"][(count,)]
            launch(groups, hyper, steps, same_step, clip, table, num_warps=1)
        return _NumbersTable(table, module, ratios)

    def measure(self, part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        device, rows = part.kind.device, len(part.positions)
        chunks, first_chunk, pointers = self._tables_of(part)
        if not len(chunks):
            return torch.zeros(2, rows, dtype=torch.float64, device=device)
        by_row = torch.empty(2, rows, dtype=torch.float64, device=device)
        sums = torch.empty(len(chunks), 2, dtype=torch.float64, device=device)
        scalars = self._table(part, numbers)
        module = _module(self._rule, part.kind)
        block = triton_kernel.block_size(measure_body(self._rule), part.kind)
        sizes = {"CHUNK": self.chunk, "BLOCK": block}
        num_warps = triton_kernel.NUM_WARPS
        with _on(device):
            launch = module["measure"][(len(chunks),)]
            launch(chunks, pointers, scalars, sums, num_warps=num_warps, **sizes)
            module["add_up"][(rows,)](first_chunk, sums, by_row, rows, BLOCK=128, num_warps=4)
        return by_row

    def move(self, part: ParameterBatch, numbers: StepNumbers) -> None:
        chunks, _, pointers = self._tables_of(part)
        if len(chunks):
            scalars = self._table(part, numbers)
            block = triton_kernel.block_size(move_body(self._rule), part.kind)
            sizes = {"CHUNK": self.chunk, "BLOCK": block}
            launch = _module(self._rule, part.kind)["move"][(len(chunks),)]
            with _on(part.kind.device):
                launch(chunks, pointers, scalars, num_warps=triton_kernel.NUM_WARPS, **sizes)
        torch.autograd.graph.increment_version([*part.weights, *part.mirrors])


class _NumbersTable(StepNumbers):
    """The numbers of a step in the kernels' table, shape [parameters, `number_names`]."""

    def __init__(self, table: Tensor, module: dict[str, Any], ratios: Tensor) -> None:
        super().__init__({}, {})
        self._table = table
        self._module = module
        self._ratios = ratios

    def table(self, names: tuple[str, ...]) -> Tensor:
        return self._table

    def after(self, rule: type[Rule], sums: Tensor) -> tuple[Tensor, StepNumbers]:
        count = len(self._table)
        with _on(sums.device):
            self._module["rates"][(count,)](sums, self._table, self._ratios, count, num_warps=1)
        return self._ratios, self


def _steps(step: Tensor | None, device: torch.device) -> tuple[Tensor | None, float | None]:
    """``step`` on ``device``, or the one number that it holds, which needs no copy."""
    if step is None:
        return None, None
    if step.device.type == "cpu":
        low, high = (bound.item() for bound in step.aminmax())
        if low == high:
            return None, low
    return send(step, device), None


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


_module = cached(triton_kernel.compile_module)


@functools.cache
def triton_is_here() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
