"""The plain runner: one parameter after another, one operation after another."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, norm_dtype
from lightning_ring.optim.engine.rule import Rule, StepNumbers


class PlainRunner:
    """Runs a `Rule` over the parameters of a `ParameterBatch`, tensors of any layout.

    The other runners override these methods.
    """

    def __init__(self, rule: type[Rule]) -> None:
        self._rule = rule

    def waves(self, part: ParameterBatch) -> list[ParameterBatch]:
        """``part``, cut up if measuring and moving a few parameters at a time is faster than all
        at once.
        """
        return [part]

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        """Sum of squares of all gradients, 0-d, on the part's device."""
        return torch.stack([_square_sum(grad.to(part.kind.compute)) for grad in part.grads]).sum()

    def measure(self, part: ParameterBatch, numbers: StepNumbers) -> Tensor:
        """Accumulate state, and return sums over each parameter, shape [2, parameters]: squares of
        the weights, squares of the direction."""
        sums = []
        for i, position in enumerate(part.positions):
            h, state = numbers.at(position), part.states[i]
            w, g = part.weights[i].to(part.kind.compute), part.grads[i].to(part.kind.compute)
            new_state = self._rule.accumulate(w, g, state, h)
            x = self._rule.direction(w, g, new_state, h)
            sums.append(torch.stack([_square_sum(w), _square_sum(x)]))
            _store(state, new_state)
        return torch.stack(sums, dim=1)

    def move(self, part: ParameterBatch, numbers: StepNumbers) -> None:
        """Write the new weights and state."""
        for i, position in enumerate(part.positions):
            h, state = numbers.at(position), part.states[i]
            w, g = part.weights[i].to(part.kind.compute), part.grads[i].to(part.kind.compute)
            x = self._rule.direction(w, g, state, h)
            new_w, new_state = self._rule.move(w, g, x, state, h)
            _store((part.weights[i], *state), (new_w, *new_state))
            if part.mirrors:
                _store((part.mirrors[i],), (part.weights[i],))


def _square_sum(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=norm_dtype(x.device)).square()


def _store(targets: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        if value is not target:
            target.copy_(value)
