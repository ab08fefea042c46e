"""The parameters of a step, found again at the next step if only gradients have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, ParameterList

# Loops over all parameters cost the host most of a fused step; `map` calls these from C.
DTYPE, DEVICE = attrgetter("dtype"), attrgetter("device")


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
        self._parts = [replace(part, grads=[]) for part in parts]
        taken = {position for part in parts for position in part.positions}
        self._has_grad = [position in taken for position in range(len(listed.params))]
        self._layouts = [
            (params, *(list(map(ask, params)) for ask in (Tensor.stride, DTYPE, DEVICE)))
            for params in (
                [listed.params[position] for position in part.positions] for part in parts
            )
        ]
        self._state = _values(state)

    def at_next_step(
        self, listed: ParameterList, state: Mapping[Tensor, Any]
    ) -> list[ParameterBatch] | None:
        """The batches with the gradients of now; None if they have to be collected anew."""
        if listed is not self._listed or not _same(_values(state), self._state):
            return None
        grads: list[Any] = [param.grad for param in listed.params]
        if [grad is not None for grad in grads] != self._has_grad:
            return None
        parts = []
        for part, (params, strides, dtypes, devices) in zip(
            self._parts, self._layouts, strict=True
        ):
            own = grads
            if len(part.positions) < len(grads):
                own = [grads[position] for position in part.positions]
            try:
                own_strides = list(map(Tensor.stride, own))
            except RuntimeError:  # a sparse gradient has none
                return None
            if (
                own_strides != strides
                or list(map(DTYPE, own)) != [part.kind.grad] * len(own)
                or list(map(Tensor.stride, params)) != strides
                or list(map(DTYPE, params)) != dtypes
                or list(map(DEVICE, params)) != devices
            ):
                return None
            parts.append(replace(part, grads=own))
        return parts


def _values(state: Mapping[Tensor, Any]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, state.values())))


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))
