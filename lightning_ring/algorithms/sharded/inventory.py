"""Optimizer state of parts of parameters, from which other parts can be cut."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PartState = Sequence[dict[str, Any] | None]  # of one part, by optimizer


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """``numel`` elements of parameter number ``index`` of a module, from ``first`` on, in the
    order of memory.
    """

    index: int
    first: int
    numel: int

    @property
    def end(self) -> int:
        return self.first + self.numel


class Inventory:
    """Parts that share no element, with the optimizers' state of each. One of a part's tensors is
    1-D and as long as the part, or belongs to the parameter as a whole."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[Span, PartState]] = {}  # by parameter

    def add(self, span: Span, state: PartState) -> None:
        """Replaces the parts that share elements with this one: they were cut for other ranks,
        and are older.
        """
        parts = self._parts.setdefault(span.index, {})
        for other in [span, *self._overlapping(span)]:  # a part of no elements shares none
            parts.pop(other, None)
        parts[span] = state

    def get(self, span: Span) -> PartState | None:
        """The state of exactly this part."""
        return self._parts.get(span.index, {}).get(span)

    def spans(self) -> list[Span]:
        return [span for parts in self._parts.values() for span in parts]

    def missing(self, span: Span) -> list[Span]:
        """The elements of ``span`` that are in no part."""
        gaps, position = [], span.first
        for part in self._overlapping(span):
            if part.first > position:
                gaps.append(Span(span.index, position, part.first - position))
            position = max(position, part.end)
        return gaps + (
            [Span(span.index, position, span.end - position)] if position < span.end else []
        )

    def cut(self, span: Span) -> PartState:
        """The state of ``span``, none of which is missing; it shares no tensor with this object."""
        parts = self._parts.get(span.index, {})
        # of no elements: only what belongs to the parameter
        chosen = self._overlapping(span) or list(parts)[:1]
        ranges = [
            (max(span.first, part.first), max(span.first, min(span.end, part.end)))
            for part in chosen
        ]
        bounds = [
            (start - part.first, stop - part.first) if start < stop else (0, 0)
            for part, (start, stop) in zip(chosen, ranges, strict=True)
        ]
        by_optimizer = zip(*(parts[part] for part in chosen), strict=True)
        return [_joined(states, bounds) for states in by_optimizer]

    def _overlapping(self, span: Span) -> list[Span]:
        parts = self._parts.get(span.index, {})
        return sorted(part for part in parts if part.first < span.end and span.first < part.end)


def is_part(value: Any) -> bool:
    """Whether a value of optimizer state has one number for each element of its part."""
    return isinstance(value, Tensor) and value.dim() == 1


def _joined(
    states: Sequence[dict[str, Any] | None], bounds: Sequence[tuple[int, int]]
) -> dict[str, Any] | None:
    if states[0] is None:
        return None
    joined = {}
    for key, value in states[0].items():
        if is_part(value):
            values = [state[key] for state in states if state is not None]
            joined[key] = torch.cat(
                [value[start:stop] for value, (start, stop) in zip(values, bounds, strict=True)]
            )
        else:
            joined[key] = copy.deepcopy(value)
    return joined
