"""The multi-tensor way: many tensors a call, in pieces small enough that temporaries stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.numbers import StepNumbers
from lightning_ring.optim.roster import Part, flat, norm_dtype
from lightning_ring.optim.rule import Rule, Scalars
from lightning_ring.optim.tensor_list import TensorList

CPU_PIECE = 1 << 16  # elements: five float32 streams of this length fit a 2 MiB second-level cache
DEVICE_PIECE = 1 << 20
# Outside this range a float32 sum of up to CPU_PIECE squares may have lost digits to underflow, or overflowed.
SAFE_SQUARES = (1e-26, 1e36)

Tensors = Sequence[Tensor]


@dataclass(slots=True)
class Batch:
    """What one call works on: 1-D pieces of the ``rows``-th tensors of a part."""

    rows: list[int]
    weights: Tensors
    grads: Tensors
    states: list[Tensors]
    mirrors: Tensors


class MultiTensorRunner:
    """Runs a rule on `TensorList`s of pieces: large tensors are cut, small ones put together.

    On a device a call works on a hundredth of all parameters or more, which keeps temporaries under 5 % of them.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._cut: tuple[Part, list[Batch]] | None = None

    def grad_square_sum(self, part: Part) -> Tensor:
        sums = [_square_sums(_cast(batch.grads, part.kind.compute)) for batch in self._batches(part)]
        return _as_vector([value for values in sums for value in values], part).sum()

    def measure(self, part: Part, numbers: StepNumbers, deferred: bool) -> Tensor:
        sums: list[list[Any]] = [[], [], []]
        rows: list[int] = []
        for batch in self._batches(part):
            h = _scalars(part, numbers, batch.rows)
            w, g = _cast(batch.weights, part.kind.compute), _cast(batch.grads, part.kind.compute)
            # State that is about to be stored may be overwritten; else it has to outlive this call.
            state = tuple(TensorList.of(s, given=not deferred) for s in batch.states)
            state = self._rule.accumulate(TensorList.of(w), TensorList.of(g), state, h)
            if not deferred:
                _store(batch.states, state, None)
                state = tuple(TensorList.of(s) for s in batch.states)
            x = self._rule.direction(TensorList.of(w), TensorList.of(g), state, h).tensors()
            sums[0] += _square_sums(w)
            sums[1] += _square_sums(x)
            sums[2] += [(t * 0).sum(dtype=norm_dtype(t.device)) for t in g] if deferred else [0.0] * len(w)
            rows += batch.rows
        return torch.stack([_sum_by_row(values, rows, part) for values in sums])

    def move(self, part: Part, numbers: StepNumbers, deferred: bool, keep: Tensor | None) -> None:
        given = keep is None
        for batch in self._batches(part):
            h = _scalars(part, numbers, batch.rows)
            w, g = _cast(batch.weights, part.kind.compute), _cast(batch.grads, part.kind.compute)
            state = tuple(TensorList.of(s, given=given) for s in batch.states)
            if deferred:
                accumulated = self._rule.accumulate(TensorList.of(w), TensorList.of(g), state, h)
                state = tuple(
                    TensorList.of(new.tensors(), given=given or new is not old)
                    for new, old in zip(accumulated, state, strict=True)
                )
            new_w, new_state = self._rule.move(TensorList.of(w, given=given), TensorList.of(g), state, h)
            _store((batch.weights, *batch.states), (new_w, *new_state), keep)
            if batch.mirrors:
                torch._foreach_copy_(batch.mirrors, batch.weights)
        self._cut = None

    def _batches(self, part: Part) -> list[Batch]:
        """``part`` cut up; kept from `measure` to `move`."""
        if self._cut is None or self._cut[0] is not part:
            self._cut = (part, cut(part, _piece_size(part)))
        return self._cut[1]


def cut(part: Part, piece_size: int) -> list[Batch]:
    """All of ``part`` in batches of at most ``piece_size`` elements."""
    columns = [part.weights, part.grads, *zip(*part.states, strict=True)] + ([part.mirrors] if part.mirrors else [])
    num_states = len(part.states[0])
    batches: list[Batch] = []
    small: list[int] = []
    room = piece_size

    def close(rows: list[int], views: list[Tensors]) -> None:
        states = views[2 : 2 + num_states]
        batches.append(Batch(rows, views[0], views[1], states, views[2 + num_states] if part.mirrors else ()))

    def close_small() -> None:
        if small:
            close(list(small), [[flat(column[row]) for row in small] for column in columns])
            small.clear()

    for row, weight in enumerate(part.weights):
        size = weight.numel()
        if size > piece_size:
            for views in zip(*(flat(column[row]).split(piece_size) for column in columns), strict=True):
                close([row], [[view] for view in views])
            continue
        if size > room:
            close_small()
            room = piece_size
        small.append(row)
        room -= size
    close_small()
    return batches


def _piece_size(part: Part) -> int:
    if part.kind.device.type == "cpu":
        return CPU_PIECE
    return max(DEVICE_PIECE, sum(weight.numel() for weight in part.weights) // 100)


def _cast(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return tensors if tensors[0].dtype == dtype else [tensor.to(dtype) for tensor in tensors]


def _scalars(part: Part, numbers: StepNumbers, rows: list[int]) -> Scalars:
    """The rows' scalars, each a float if it is one float for all of them, else a list."""
    scalars = Scalars()
    for name in numbers.on_device:
        values: list[Any] = numbers.values(name)
        picked = [values[part.positions[row]] for row in rows]
        single = isinstance(picked[0], float) and all(value == picked[0] for value in picked)
        setattr(scalars, name, picked[0] if single else picked)
    return scalars


def _store(targets: Sequence[Tensors], values: Sequence[TensorList], keep: Tensor | None) -> None:
    for target, value in zip(targets, values, strict=True):
        results = value.tensors()
        if results[0] is target[0]:
            continue  # computed in place, or not changed
        if keep is not None:
            results = [torch.where(keep, new.to(old.dtype), old) for new, old in zip(results, target, strict=True)]
        torch._foreach_copy_(target, results)


def _square_sums(tensors: Tensors) -> list[Any]:
    """Sum of squares of each 1-D tensor: floats on the CPU, else 0-d tensors; float64 where there is float64."""
    first = tensors[0]
    if first.device.type != "cpu":
        return list(torch._foreach_pow(torch._foreach_norm(tensors, 2, norm_dtype(first.device)), 2.0))
    sums = []
    for tensor in tensors:
        total = torch.dot(tensor, tensor).item()
        if tensor.dtype != torch.float64 and not SAFE_SQUARES[0] < total < SAFE_SQUARES[1]:
            total = torch.linalg.vector_norm(tensor, dtype=torch.float64).item() ** 2
        sums.append(total)
    return sums


def _as_vector(values: list[Any], part: Part) -> Tensor:
    if isinstance(values[0], Tensor):
        return torch.stack(values)
    return torch.tensor(values, dtype=norm_dtype(part.kind.device), device=part.kind.device)


def _sum_by_row(values: list[Any], rows: list[int], part: Part) -> Tensor:
    """Add up the pieces of each row, in their order, so that the sum has the same bits every time."""
    per_row: list[list[Any]] = [[] for _ in part.positions]
    for row, value in zip(rows, values, strict=True):
        per_row[row].append(value)
    return _as_vector([found[0] if len(found) == 1 else sum(found[1:], found[0]) for found in per_row], part)
