"""The plain runner: one parameter after another, one operation after another."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, norm_dtype
from lightning_ring.optim.engine.rule import Rule, StepNumbers


class PlainRunner:
    """Runs a `Rule` over the parameters of a `ParameterBatch`, tensors of any layout; `torch.compile` can trace it.

    The other runners override these methods.
    """

    def __init__(self, rule: type[Rule]) -> None:
        self._rule = rule

    def waves(self, part: ParameterBatch) -> list[ParameterBatch]:
        """``part``, cut up if measuring and moving a few parameters at a time is faster than all at once."""
        return [part]

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        """Sum of squares of all gradients, 0-d, on the part's device."""
        return torch.stack([_square_sum(grad.to(part.kind.compute)) for grad in part.grads]).sum()

    def measure(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool) -> Tensor:
        """Accumulate state, and return sums over each parameter, shape [3, parameters].

        Rows: squares of the weights; squares of the direction; if ``deferred``, 0 where the gradient is finite and NaN
        elsewhere. With ``deferred`` nothing is written: `move` accumulates again.
        """
        sums = []
        for i, position in enumerate(part.positions):
            h, state = numbers.at(position), part.states[i]
            w, g = part.weights[i].to(part.kind.compute), part.grads[i].to(part.kind.compute)
            new_state = self._rule.accumulate(w, g, state, h)
            x = self._rule.direction(w, g, new_state, h)
            probe = (g * 0).sum(dtype=norm_dtype(g.device)) if deferred else torch.zeros_like(_square_sum(w))
            sums.append(torch.stack([_square_sum(w), _square_sum(x), probe]))
            if not deferred:
                _store(state, new_state, None)
        return torch.stack(sums, dim=1)

    def move(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool, keep: Tensor | None) -> None:
        """Write the new weights and state; where the 0-d bool tensor ``keep`` is given and False, write nothing."""
        for i, position in enumerate(part.positions):
            h, state = numbers.at(position), part.states[i]
            w, g = part.weights[i].to(part.kind.compute), part.grads[i].to(part.kind.compute)
            new_state = self._rule.accumulate(w, g, state, h) if deferred else state
            x = self._rule.direction(w, g, new_state, h)
            new_w, new_state = self._rule.move(w, g, x, new_state, h)
            _store((part.weights[i], *state), (new_w, *new_state), keep)
            if part.mirrors:
                _store((part.mirrors[i],), (part.weights[i],), keep)


def _square_sum(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=norm_dtype(x.device)).square()


def _store(targets: tuple[Tensor, ...], values: tuple[Tensor, ...], keep: Tensor | None) -> None:
    for target, value in zip(targets, values, strict=True):
        if value is not target:
            target.copy_(value if keep is None else torch.where(keep, value.to(target.dtype), target))
