"""The multi-tensor way: many tensors a call, in pieces so small that temporaries stay in the
cache. The plain way: one parameter after another, of any layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, flat, norm_dtype
from lightning_ring.optim.engine.rule import Rule, Scalars, States, StepNumbers, Tensors

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
class Piece:
    """The operands of one call: pieces of the ``rows``-th tensors of a batch, or all of them."""

    rows: list[int]
    weights: Tensors
    grads: Tensors
    states: States
    directions: Tensors | None = None

    def split(self, size: int) -> list[Piece]:
        """The same, cut into pieces of at most ``size`` elements if it is of one tensor."""
        if len(self.rows) > 1:
            return [self]
        columns = self.weights, self.grads, *self.states
        parts = zip(*(column[0].split(size) for column in columns), strict=True)
        return [Piece(self.rows, [w], [g], [[state] for state in rest]) for w, g, *rest in parts]


class MultiTensorRun:
    """One step of the parameters of ``part``. Large tensors are cut, small ones put together.

    Temporaries stay under 5 % of the parameters (or 256 KiB): on the CPU the directions of one wave
    are kept from `measure` to `move`; on a device a call works on a hundredth of the parameters. A
    fused CPU kernel of torch that computes the rule is called instead.
    """

    def __init__(self, rule: type[Rule], part: ParameterBatch, numbers: StepNumbers) -> None:
        self._rule = rule
        self._part = part
        self._numbers = numbers
        kind = part.kind
        self._plain = kind.way == "plain"
        self._on_cpu = kind.device.type == "cpu"
        is_one_dtype = kind.weight == kind.grad == kind.compute
        self._by_torch = self._on_cpu and is_one_dtype and not self._plain
        # Those kernels read and write the tensors once each, and there is nothing to keep.
        self._sweeps = self._by_torch and not rule.keeps_directions
        columns = part.columns()
        self._columns = columns if self._plain else [list(map(flat, column)) for column in columns]
        self._sizes = [weight.numel() for weight in part.weights]
        self._room = 0  # elements of the directions that are kept from `measure` to `move`
        self.sums = torch.zeros(
            2, len(self._sizes), dtype=norm_dtype(kind.device), device=kind.device
        )

    def measure(self) -> None:
        """Accumulate state, and fill `sums`: squares of the weights, squares of the direction."""
        self._measure(self._whole)

    def move(self, *, measured: bool) -> Tensor:
        """Measure, a wave at a time, unless that is done; then write the new weights and state.
        Returns the trust ratios.
        """
        for pieces in [self._whole] if measured else self._waves():
            if not measured:
                self._measure(pieces)
            ratios = self._numbers.add_rates(self.sums)
            self._move(pieces)
        if self._part.mirrors:
            torch._foreach_copy_(self._part.mirrors, self._part.weights)
        return ratios

    def _waves(self) -> list[list[Piece]]:
        if not self._on_cpu or self._plain or self._sweeps:
            return [self._whole]
        sizes, kind = self._sizes, self._part.kind
        pieces = 4 if kind.weight == kind.compute else 6  # that exist beside the kept directions
        budget = MEMORY_SHARE * sum(sizes) * kind.weight.itemsize / kind.compute.itemsize
        self._room = max(CPU_PIECE, int(budget) - pieces * CPU_PIECE)
        waves = _together(range(len(sizes)), sizes, self._room)
        return [self._cut(rows) for rows in waves]

    @cached_property
    def _whole(self) -> list[Piece]:
        return self._cut(range(len(self._sizes)))

    def _measure(self, pieces: list[Piece]) -> None:
        part = self._part
        totals: list[dict[int, Any]] = [{}, {}]
        to_come = sum(weight.numel() for piece in pieces for weight in piece.weights)
        for piece, h in self._with_numbers(pieces):
            w, g = _cast(piece.weights, part.kind.compute), _cast(piece.grads, part.kind.compute)
            # first: a lone reading sweep is the fastest way to bring them into the cache
            self._add_squares(totals[0], piece.rows, w)
            x = self._rule.torch_directions(w, g, piece.states, h) if self._by_torch else None
            if x is None:
                self._rule.accumulate(g, piece.states, h)
                x = self._rule.direction(w, g, piece.states, h)
            self._add_squares(totals[1], piece.rows, x)
            piece.directions = x if to_come <= self._room else None
            to_come -= sum(t.numel() for t in w)
            x = None  # so that the next piece finds the same memory, still in the cache
        rows = sorted(totals[0])
        found: Any = [[total[row] for row in rows] for total in totals]
        if isinstance(found[0][0], Tensor):
            found = torch.stack(list(map(torch.stack, found)))
        else:
            found = torch.tensor(found, dtype=self.sums.dtype)
        if len(rows) == len(self._sizes):
            self.sums = found
        else:
            self.sums[:, rows] = found

    def _move(self, pieces: list[Piece]) -> None:
        # what was measured last may still be in the cache
        for piece, h in self._with_numbers(reversed(pieces)):
            if not self._by_torch or not self._torch_moves(piece, h):
                for smaller in piece.split(CPU_PIECE) if self._sweeps else [piece]:
                    self._move_piece(smaller, h)
            piece.directions = None

    def _with_numbers(self, pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Scalars]]:
        h, rows = Scalars(), None
        for piece in pieces:
            if piece.rows is not rows:  # pieces of one tensor share the list
                h, rows = self._numbers.over(piece.rows, self._plain), piece.rows
            yield piece, h

    def _move_piece(self, piece: Piece, h: Scalars) -> None:
        compute = self._part.kind.compute
        w, g = _cast(piece.weights, compute), _cast(piece.grads, compute)
        x = piece.directions
        if x is None:
            x = self._rule.direction(w, g, piece.states, h)
        self._rule.move(w, g, x, piece.states, h)
        if w is not piece.weights:
            torch._foreach_copy_(piece.weights, w)

    def _torch_moves(self, piece: Piece, h: Scalars) -> bool:
        if len(piece.rows) > 1 or piece.directions is not None:
            return False
        moved = self._rule.torch_move(piece.weights, piece.grads, piece.states, h)
        if moved:
            torch.autograd.graph.increment_version(piece.weights)  # fused SGD leaves it out
        return moved

    def _cut(self, rows: Sequence[int]) -> list[Piece]:
        """Pieces of one tensor longer than ``together``, or of several tensors of at most so many
        elements.
        """
        sizes = self._sizes
        size = together = CPU_PIECE
        if not self._on_cpu:
            size = together = max(DEVICE_PIECE, sum(sizes) // 100)
        elif self._sweeps:
            size, together = CPU_SWEEP_PIECE, CPU_SWEEP_TOGETHER
        groups = [[row] for row in rows] if self._plain else _together(rows, sizes, together)
        pieces: list[Piece] = []
        for group in groups:
            views: States = [[column[row] for row in group] for column in self._columns]
            piece = Piece(group, views[0], views[1], views[2:])
            is_cut = sizes[group[0]] > together and not self._plain
            pieces += piece.split(size) if is_cut else [piece]
        return pieces

    def _add_squares(self, total: dict[int, Any], rows: list[int], tensors: Tensors) -> None:
        """Add the sums of squares of ``tensors`` to those of their rows, in the same order every
        time.
        """
        if self._on_cpu and not self._plain:
            found: list[Any] = [sum(map(_square_sum, t.split(CPU_SUM_PIECE))) for t in tensors]
        else:
            norms = torch._foreach_norm(tensors, 2, norm_dtype(tensors[0].device))
            found = list(torch._foreach_pow(norms, 2.0))
        for row, value in zip(rows, found, strict=True):
            total[row] = total[row] + value if row in total else value


def grad_square_sum(part: ParameterBatch) -> Tensor:
    """Sum of squares of all gradients, 0-d, on the part's device."""
    kind, dtype = part.kind, norm_dtype(part.kind.device)
    if kind.device.type != "cpu" or kind.way == "plain":
        return torch.stack(torch._foreach_norm(part.grads, 2, dtype)).square().sum()
    size = CPU_SUM_PIECE if kind.grad == kind.compute else CPU_PIECE
    pieces = (piece for grad in part.grads for piece in flat(grad).split(size))
    return torch.tensor(
        [_square_sum(piece.to(kind.compute)) for piece in pieces], dtype=dtype
    ).sum()


def _together(rows: Sequence[int], sizes: list[int], most: int) -> Iterator[list[int]]:
    """``rows`` in groups of at most ``most`` elements; larger tensors go alone."""
    group: list[int] = []
    taken = 0
    for row in rows:
        if sizes[row] > most:
            yield [row]
            continue
        if taken + sizes[row] > most:
            yield group
            group, taken = [], 0
        group.append(row)
        taken += sizes[row]
    if group:
        yield group


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def _square_sum(tensor: Tensor) -> float:
    low, high = SAFE_SQUARES
    total = torch.dot(tensor, tensor).item()
    if not low < total < high and tensor.dtype != torch.float64:
        total = torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2
    return total
