"""The multi-tensor runner: many tensors a call, in pieces so small that temporaries stay in the
cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, flat, norm_dtype
from lightning_ring.optim.engine.plain import PlainRunner
from lightning_ring.optim.engine.rule import Rule, Scalars, StepNumbers
from lightning_ring.optim.engine.tensor_list import TensorList, Tensors

CPU_PIECE = 1 << 16  # elements: five float32 streams of this length fit a 2 MiB second-level cache
# where torch's kernels leave no temporaries: each call costs more than a longer piece
CPU_SWEEP_PIECE = 1 << 20
CPU_SWEEP_TOGETHER = 1 << 14  # tensors that those kernels do not take one by one
# one stream, read once: the longer the better, as far as float32 sums stay precise
CPU_SUM_PIECE = 1 << 18
DEVICE_PIECE = 1 << 20
MEMORY_SHARE = 0.049
# Outside this range a float32 sum of up to CPU_SUM_PIECE squares may have lost digits to underflow,
# or overflowed.
SAFE_SQUARES = (1e-26, 1e36)


@dataclass(slots=True)
class Batch:
    """The operands of one call: 1-D pieces of the ``rows``-th tensors of a part."""

    rows: list[int]
    weights: Tensors
    grads: Tensors
    states: list[Tensors]
    mirrors: Tensors
    directions: Tensors | None = None

    @classmethod
    def of(cls, rows: list[int], columns: Sequence[Tensors], num_states: int) -> Batch:
        """Of the columns of a `ParameterBatch`."""
        weights, grads, *rest = columns
        return cls(
            rows,
            weights,
            grads,
            rest[:num_states],
            rest[num_states] if len(rest) > num_states else (),
        )

    def pieces(self, size: int) -> list[Batch]:
        """The same, cut into pieces of at most ``size`` elements."""
        if len(self.rows) > 1:
            return [self]
        columns = [self.weights, self.grads, *self.states] + (
            [self.mirrors] if self.mirrors else []
        )
        pieces = zip(*(column[0].split(size) for column in columns), strict=True)
        return [
            Batch.of(self.rows, [[view] for view in piece], len(self.states)) for piece in pieces
        ]


class MultiTensorRunner(PlainRunner):
    """Runs a rule on `TensorList`s of pieces: large tensors are cut, small ones put together.

    Temporaries stay under 5 % of the parameters (or 256 KiB): on the CPU the directions of one wave
    are kept from `measure` to `move`; on a device a call works on a hundredth of the parameters. A
    fused CPU kernel of torch that computes the rule is called instead.
    """

    def __init__(self, rule: type[Rule]) -> None:
        super().__init__(rule)
        self._cut: tuple[ParameterBatch, list[Batch]] | None = None

    def waves(self, part: ParameterBatch) -> list[ParameterBatch]:
        if part.kind.device.type != "cpu" or self._sweeps(part):
            return [part]
        kind = part.kind
        pieces = 4 if kind.weight == kind.compute else 6  # that exist beside the kept directions
        budget = (
            MEMORY_SHARE * sum(weight.nbytes for weight in part.weights) / kind.compute.itemsize
        )
        return list(_split(part, room=max(CPU_PIECE, int(budget) - pieces * CPU_PIECE)))

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        kind = part.kind
        if kind.device.type == "cpu" and kind.grad == kind.compute:
            pieces = [piece for grad in part.grads for piece in flat(grad).split(CPU_SUM_PIECE)]
            return _as_vector(_square_sums(pieces), part).sum()
        sums = [_square_sums(_cast(batch.grads, kind.compute)) for batch in self._batches(part)]
        return _as_vector([value for values in sums for value in values], part).sum()

    def measure(self, part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        sums: list[list[Any]] = [[], []]
        rows: list[int] = []
        try_torch = _fits_torch_kernels(part)
        h, rows_of_h = Scalars(), None
        to_come = sum(weight.numel() for weight in part.weights)
        for batch in self._batches(part):
            w, g = _cast(batch.weights, part.kind.compute), _cast(batch.grads, part.kind.compute)
            if batch.rows is not rows_of_h:  # pieces of one tensor share the list
                h, rows_of_h = _scalars(part, numbers, batch.rows), batch.rows
            # first: a lone reading sweep is the fastest way to bring them into the cache
            sums[0] += _square_sums(w)
            x = self._rule.torch_directions(w, g, tuple(batch.states), h) if try_torch else None
            if x is None:
                x = self._directions(w, g, batch, h)
            sums[1] += _square_sums(x)
            rows += batch.rows
            batch.directions = x if to_come <= part.room else None
            to_come -= sum(t.numel() for t in w)
            x = None  # so that the next piece finds the same memory, still in the cache
        return torch.stack([_sum_by_row(values, rows, part) for values in sums])

    def _directions(self, w: Tensors, g: Tensors, batch: Batch, h: Scalars) -> Tensors:
        weights, grads, state = TensorList(w), TensorList(g), tuple(map(TensorList, batch.states))
        _store(batch.states, self._rule.accumulate(weights, grads, state, h))
        return self._rule.direction(weights, grads, state, h).tensors()

    def move(self, part: ParameterBatch, numbers: StepNumbers) -> None:
        try_torch = _fits_torch_kernels(part)
        # what was measured last may still be in the cache
        for batch in reversed(self._batches(part)):
            if not try_torch or not self._torch_moves(part, numbers, batch):
                for piece in batch.pieces(CPU_PIECE) if self._sweeps(part) else [batch]:
                    self._move(part, piece, _scalars(part, numbers, batch.rows))
            if batch.mirrors:
                torch._foreach_copy_(batch.mirrors, batch.weights)
            batch.directions = None
        self._cut = None

    def _move(self, part: ParameterBatch, batch: Batch, h: Scalars) -> None:
        w, g = _cast(batch.weights, part.kind.compute), _cast(batch.grads, part.kind.compute)
        weights, grads, state = TensorList(w), TensorList(g), tuple(map(TensorList, batch.states))
        x = batch.directions
        direction = self._rule.direction(weights, grads, state, h) if x is None else TensorList(x)
        new_w, new_state = self._rule.move(weights, grads, direction, state, h)
        _store((batch.weights, *batch.states), (new_w, *new_state))

    def _torch_moves(self, part: ParameterBatch, numbers: StepNumbers, batch: Batch) -> bool:
        if len(batch.rows) > 1:
            return False
        (row,), (w,), (g,) = batch.rows, batch.weights, batch.grads
        x = None if batch.directions is None else batch.directions[0]
        if not self._rule.torch_move(
            w, g, x, tuple(s[0] for s in batch.states), numbers.at(part.positions[row])
        ):
            return False
        torch.autograd.graph.increment_version(w)  # torch's fused SGD leaves it out
        return True

    def _batches(self, part: ParameterBatch) -> list[Batch]:
        """``part`` cut up; kept from `measure` to `move`."""
        if self._cut is None or self._cut[0] is not part:
            piece = together = CPU_PIECE
            if part.kind.device.type != "cpu":
                piece = together = max(
                    DEVICE_PIECE, sum(weight.numel() for weight in part.weights) // 100
                )
            elif self._sweeps(part):
                piece, together = CPU_SWEEP_PIECE, CPU_SWEEP_TOGETHER
            self._cut = (part, cut(part, piece, together))
        return self._cut[1]

    def _sweeps(self, part: ParameterBatch) -> bool:
        """Whether torch's kernels read and write the tensors once each, and there is nothing to
        keep in the cache.
        """
        return not self._rule.keeps_directions and _fits_torch_kernels(part)


def _fits_torch_kernels(part: ParameterBatch) -> bool:
    kind = part.kind
    return kind.device.type == "cpu" and kind.weight == kind.grad == kind.compute


def _split(part: ParameterBatch, room: int) -> Iterator[ParameterBatch]:
    """``part`` in waves of at most ``room`` elements, whose directions may be kept; larger
    tensors go alone.
    """
    rows: list[int] = []
    taken = 0
    for row, weight in enumerate(part.weights):
        size = weight.numel()
        if size > room:
            yield part.subset([row], room)
            continue
        if taken + size > room:
            yield part.subset(rows, room)
            rows, taken = [], 0
        rows.append(row)
        taken += size
    if rows:
        yield part.subset(rows, room)


def cut(part: ParameterBatch, piece_size: int, together: int) -> list[Batch]:
    """Batches of one piece of a tensor longer than ``together``, or of several tensors of at
    most so many elements.
    """
    columns, num_states = part.columns(), len(part.states[0])
    batches: list[Batch] = []
    small: list[int] = []
    room = together

    def close_small() -> None:
        if small:
            views = [[flat(column[row]) for row in small] for column in columns]
            batches.append(Batch.of(list(small), views, num_states))
            small.clear()

    for row, weight in enumerate(part.weights):
        size = weight.numel()
        if size > together:
            rows = [row]
            for views in zip(
                *(flat(column[row]).split(piece_size) for column in columns), strict=True
            ):
                batches.append(Batch.of(rows, [[view] for view in views], num_states))
            continue
        if size > room:
            close_small()
            room = together
        small.append(row)
        room -= size
    close_small()
    return batches


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def _scalars(part: ParameterBatch, numbers: StepNumbers, rows: list[int]) -> Scalars:
    return numbers.over([part.positions[row] for row in rows])


def _store(targets: Sequence[Tensors], values: Sequence[TensorList]) -> None:
    for target, value in zip(targets, values, strict=True):
        results: Tensors = value.tensors()
        if results[0] is not target[0]:  # else not changed
            torch._foreach_copy_(target, results)


def _square_sums(tensors: Tensors) -> list[Any]:
    """Sum of squares of each 1-D tensor: floats on the CPU, else 0-d tensors; float64 where
    there is float64.
    """
    first = tensors[0]
    if first.device.type != "cpu":
        return list(
            torch._foreach_pow(torch._foreach_norm(tensors, 2, norm_dtype(first.device)), 2.0)
        )
    return [sum(map(_square_sum, tensor.split(CPU_SUM_PIECE))) for tensor in tensors]


def _square_sum(tensor: Tensor) -> float:
    low, high = SAFE_SQUARES
    total = torch.dot(tensor, tensor).item()
    if not low < total < high and tensor.dtype != torch.float64:
        total = torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2
    return total


def _as_vector(values: list[Any], part: ParameterBatch) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=norm_dtype(part.kind.device), device=part.kind.device)


def _sum_by_row(values: list[Any], rows: list[int], part: ParameterBatch) -> Tensor:
    """Add up the pieces of each row, in their order, so that the sum has the same bits every
    time.
    """
    per_row: list[list[Any]] = [[] for _ in part.positions]
    for row, value in zip(rows, values, strict=True):
        per_row[row].append(value)
    return _as_vector(
        [found[0] if len(found) == 1 else sum(found[1:], found[0]) for found in per_row], part
    )
