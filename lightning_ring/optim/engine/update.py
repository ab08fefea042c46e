"""One step over all parameters: measure, sum over ranks, move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.fused import FusedRun
from lightning_ring.optim.engine.multi_tensor import MultiTensorRun, grad_square_sum
from lightning_ring.optim.engine.options import RunOptions
from lightning_ring.optim.engine.parameter_list import ParameterBatch, ParameterList
from lightning_ring.optim.engine.rule import Rule, Scalars, step_numbers

NormAllReduce = Callable[[Tensor], Tensor | None]


def update(
    rule: type[Rule],
    hyperparameters: list[dict[str, Any]],
    listed: ParameterList,
    parts: list[ParameterBatch],
    options: RunOptions,
    norm_all_reduce: NormAllReduce | None,
) -> bool:
    """Take one step; returns whether it was taken: not where ``skip_nonfinite`` found a NaN or an
    infinity.

    ``hyperparameters`` are one dict for each group.
    """
    clip: Tensor | None = None
    if options.max_grad_norm is not None or options.skip_nonfinite:
        squares = torch.zeros(1, dtype=listed.ratios.dtype, device=listed.device)
        for part in parts:
            squares += grad_square_sum(part).to(listed.device)
        # Of all ranks together. It is finite where all gradients are.
        grad_norm = _reduce(squares, norm_all_reduce)[0].sqrt()
        if options.skip_nonfinite and not grad_norm.isfinite():
            return False
        if options.max_grad_norm is not None:
            clip = (grad_norm / options.max_grad_norm).clamp(min=1)
    steps = [
        _PartOfStep(rule, hyperparameters, listed, part, options.capturable, clip) for part in parts
    ]
    if norm_all_reduce is not None:
        _sum_over_ranks(listed, steps, norm_all_reduce)
    for step in steps:
        ratios = step.run.step() if norm_all_reduce is None else step.run.move()
        step.commit(ratios)
    return True


def _sum_over_ranks(
    listed: ParameterList, steps: list[_PartOfStep], norm_all_reduce: NormAllReduce
) -> None:
    sums = torch.zeros(2, len(listed.params), dtype=listed.ratios.dtype, device=listed.device)
    for step in steps:
        step.run.measure()
        sums[:, step.places(listed.device)] = step.run.sums.to(sums)
    sums = _reduce(sums.view(-1), norm_all_reduce).view_as(sums)
    for step in steps:
        found = sums[:, step.places(listed.device)].contiguous()
        step.run.sums = found.to(step.run.sums)


class _PartOfStep:
    """One step of the parameters of ``part``, and what is kept of it in ``listed``."""

    def __init__(
        self,
        rule: type[Rule],
        hyperparameters: list[dict[str, Any]],
        listed: ParameterList,
        part: ParameterBatch,
        capturable: bool,
        clip: Tensor | None,
    ) -> None:
        self._listed = listed
        self._positions = part.positions
        steps, self._step = listed.steps, None
        if steps is not None:
            self._step = steps[self.places(steps.device)] + 1
        device, is_fused = part.kind.device, part.kind.way == "fused"
        clip = None if clip is None else clip.to(device)
        on_device = is_fused or clip is not None or capturable
        place = device if on_device else torch.device("cpu")
        hyper = listed.hyper_table([list(group.values()) for group in hyperparameters], place)
        groups = listed.groups_on(place, part.positions)
        self.run: FusedRun | MultiTensorRun
        if is_fused:
            ratios = listed.ratios[self.places(listed.device)].to(device)
            self.run = FusedRun(rule, part, listed.tables, groups, hyper, self._step, clip, ratios)
        else:
            h = dict(zip(hyperparameters[0], hyper.index_select(0, groups).unbind(1), strict=True))
            numbers = step_numbers(rule, Scalars(**h), self._step, clip, device)
            self.run = MultiTensorRun(rule, part, numbers)

    def places(self, device: torch.device) -> slice | Tensor:
        """Where these parameters stand in the list."""
        if len(self._positions) == len(self._listed.params):
            return slice(None)
        key = "places", device, tuple(self._positions)
        return self._listed.tables.get(key, None, device, lambda: torch.tensor(self._positions))

    def commit(self, ratios: Tensor) -> None:
        """Keep step counts and trust ratios."""
        listed = self._listed
        if listed.steps is not None and self._step is not None:
            listed.steps[self.places(listed.steps.device)] = self._step
        if ratios.data_ptr() != listed.ratios.data_ptr():  # else kernels have written them there
            listed.ratios[self.places(listed.device)] = ratios.to(listed.ratios)


def _reduce(vector: Tensor, norm_all_reduce: NormAllReduce | None) -> Tensor:
    if norm_all_reduce is None:
        return vector
    returned = norm_all_reduce(vector)
    return vector if returned is None else returned
