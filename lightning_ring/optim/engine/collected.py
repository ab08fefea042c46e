"""The parameters of a step, found again at the next step if only gradients have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, ParameterList


class CollectedParameters:
    """The batches of one step without their gradients, and what must be as it was for the next step
    to use them.

    To sort parameters into batches looks at every tensor of every parameter, which costs the host
    more than the rest of a fused step. Gradients are not kept: other code counts references to
    them.
    """

    def __init__(
        self, listed: ParameterList, parts: list[ParameterBatch], state: Mapping[Tensor, Any]
    ) -> None:
        self._listed = listed
        self._parts = [replace(part, grads=[], tables=None) for part in parts]
        self._count = sum(len(part.positions) for part in parts)
        self._params = [[listed.params[position] for position in part.positions] for part in parts]
        self._layouts = [_layouts(params) for params in self._params]
        self._state = _values(state)

    def at_next_step(
        self, listed: ParameterList, state: Mapping[Tensor, Any]
    ) -> list[ParameterBatch] | None:
        """The batches with the gradients of now; None if they have to be collected anew."""
        if listed is not self._listed or not _same(_values(state), self._state):
            return None
        grads = [param.grad for param in listed.params]
        if sum(grad is not None for grad in grads) != self._count:
            return None
        parts = []
        for part, params, layouts in zip(self._parts, self._params, self._layouts, strict=True):
            own = [grad for grad in map(grads.__getitem__, part.positions) if grad is not None]
            if len(own) < len(params) or any(grad.layout is not torch.strided for grad in own):
                return None
            kinds = [(grad.stride(), grad.dtype) for grad in own]
            if (
                kinds != [(strides, part.kind.grad) for strides, *_ in layouts]
                or _layouts(params) != layouts
            ):
                return None
            parts.append(replace(part, grads=own))
        return parts


def _layouts(params: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(param.stride(), param.dtype, param.device) for param in params]


def _values(state: Mapping[Tensor, Any]) -> list[Any]:
    return list(chain.from_iterable(of_one.values() for of_one in state.values()))


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
