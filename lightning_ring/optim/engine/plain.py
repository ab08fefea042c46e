"""The readable way: one parameter after another, one operation after another."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.optim.engine.parameter_list import ParameterBatch, norm_dtype
from lightning_ring.optim.engine.rule import Rule, StepNumbers


def square_sum(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dtype=norm_dtype(x.device)).square()


class PlainRunner:
    """Runs a rule on tensors as they are, of any layout; `torch.compile` can trace it."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def waves(self, part: ParameterBatch) -> list[ParameterBatch]:
        return [part]

    def grad_square_sum(self, part: ParameterBatch) -> Tensor:
        return torch.stack([square_sum(grad.to(part.kind.compute)) for grad in part.grads]).sum()

    def measure(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool) -> Tensor:
        sums = []
        for i, position in enumerate(part.positions):
            h, state = numbers.at(position), part.states[i]
            w, g = part.weights[i].to(part.kind.compute), part.grads[i].to(part.kind.compute)
            new_state = self._rule.accumulate(w, g, state, h)
            x = self._rule.direction(w, g, new_state, h)
            probe = (g * 0).sum(dtype=norm_dtype(g.device)) if deferred else torch.zeros_like(square_sum(w))
            sums.append(torch.stack([square_sum(w), square_sum(x), probe]))
            if not deferred:
                _store(state, new_state, None)
        return torch.stack(sums, dim=1)

    def move(self, part: ParameterBatch, numbers: StepNumbers, deferred: bool, keep: Tensor | None) -> None:
        for i, position in enumerate(part.positions):
            h, state = numbers.at(position), part.states[i]
            w, g = part.weights[i].to(part.kind.compute), part.grads[i].to(part.kind.compute)
            new_state = self._rule.accumulate(w, g, state, h) if deferred else state
            x = self._rule.direction(w, g, new_state, h)
            new_w, new_state = self._rule.move(w, g, x, new_state, h)
            _store((part.weights[i], *state), (new_w, *new_state), keep)
            if part.mirrors:
                _store((part.mirrors[i],), (part.weights[i],), keep)


def _store(targets: tuple[Tensor, ...], values: tuple[Tensor, ...], keep: Tensor | None) -> None:
    for target, value in zip(targets, values, strict=True):
        if value is not target:
            target.copy_(value if keep is None else torch.where(keep, value.to(target.dtype), target))
