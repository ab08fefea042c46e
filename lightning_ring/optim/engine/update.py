"""One step over all parameters: measure, sum over ranks, move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ring.optim.engine.fused import FusedRun
from lightning_ring.optim.engine.multi_tensor import MultiTensorRun, grad_square_sum
from lightning_ring.optim.engine.options import RunOptions, way_to_run
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
            plain = way_to_run(options, part.kind) == "plain"
            squares += grad_square_sum(part, plain).to(listed.device)
        # Of all ranks together. It is finite where all gradients are.
        grad_norm = _reduce(squares, norm_all_reduce)[0].sqrt()
        if options.skip_nonfinite and not grad_norm.isfinite():
            return False
        if options.max_grad_norm is not None:
            clip = (grad_norm / options.max_grad_norm).clamp(min=1)
    steps = [_PartOfStep(rule, hyperparameters, listed, part, options, clip) for part in parts]
    if norm_all_reduce is None:
        for step in steps:
            step.ratios = step.run.step()
    else:
        _step_with_ranks(listed, steps, norm_all_reduce)
    for step in steps:
        step.commit()
    return True


def _step_with_ranks(
    listed: ParameterList, steps: list[_PartOfStep], norm_all_reduce: NormAllReduce
) -> None:
    sums = torch.zeros(2, len(listed.params), dtype=listed.ratios.dtype, device=listed.device)
    for step in steps:
        step.run.measure()
        sums.index_copy_(1, step.places(listed.device), step.run.sums.to(sums.device, sums.dtype))
    sums = _reduce(sums.view(-1), norm_all_reduce).view_as(sums)
    for step in steps:
        found = sums.index_select(1, step.places(listed.device))
        step.run.sums = found.to(step.run.sums)
        step.ratios = step.run.move()


class _PartOfStep:
    """One step of the parameters of ``part``, and what is kept of it in ``listed``."""

    def __init__(
        self,
        rule: type[Rule],
        hyperparameters: list[dict[str, Any]],
        listed: ParameterList,
        part: ParameterBatch,
        options: RunOptions,
        clip: Tensor | None,
    ) -> None:
        self._listed = listed
        self._positions = part.positions
        self._is_whole = len(part.positions) == len(listed.params)
        self._step = None if listed.steps is None else self._own(listed.steps) + 1
        device, way = part.kind.device, way_to_run(options, part.kind)
        clip = None if clip is None else clip.to(device)
        on_device = way == "fused" or clip is not None or options.capturable
        place = device if on_device else torch.device("cpu")
        hyper = listed.hyper_table([list(group.values()) for group in hyperparameters], place)
        groups = self._own(listed.groups_on(place))
        self.run: FusedRun | MultiTensorRun
        if way == "fused":
            self.ratios = listed.ratios
            if not self._is_whole or device != listed.device:
                self.ratios = torch.empty(len(groups), dtype=torch.float64, device=device)
            self.run = FusedRun(
                rule, part, listed.tables, groups, hyper, self._step, clip, self.ratios
            )
        else:
            h = dict(zip(hyperparameters[0], hyper.index_select(0, groups).unbind(1), strict=True))
            numbers = step_numbers(rule, Scalars(**h), self._step, clip, device)
            self.run = MultiTensorRun(rule, part, numbers, way == "plain")

    def places(self, device: torch.device) -> Tensor:
        """Where these parameters stand in the list."""
        key = "places", device, tuple(self._positions)
        return self._listed.tables.get(key, None, device, lambda: torch.tensor(self._positions))

    def _own(self, vector: Tensor) -> Tensor:
        """The values of these parameters out of those of all."""
        return vector if self._is_whole else vector.index_select(0, self.places(vector.device))

    def commit(self) -> None:
        """Write step counts and ratios."""
        for target, values in (
            (self._listed.steps, self._step),
            (self._listed.ratios, self.ratios),
        ):
            if target is None or values is None or values is target:
                continue
            if self._is_whole:
                target.copy_(values)
            else:
                target.index_copy_(0, self.places(target.device), values.to(target))


def _reduce(vector: Tensor, norm_all_reduce: NormAllReduce | None) -> Tensor:
    if norm_all_reduce is None:
        return vector
    returned = norm_all_reduce(vector)
    return vector if returned is None else returned
