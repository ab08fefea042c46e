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
from lightning_ring.optim.engine.rule import Rule, Scalars, StepNumbers

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
    runs = [_begin(rule, hyperparameters, listed, part, options.capturable, clip) for part in parts]
    if norm_all_reduce is not None:
        sums = torch.zeros(2, len(listed.params), dtype=listed.ratios.dtype, device=listed.device)
        for part, run in zip(parts, runs, strict=True):
            run.measure()
            sums[:, listed.places(part, listed.device)] = run.sums.to(sums)
        sums = _reduce(sums.view(-1), norm_all_reduce).view_as(sums)
        for part, run in zip(parts, runs, strict=True):
            run.sums = sums[:, listed.places(part, listed.device)].contiguous().to(run.sums)
    for part, run in zip(parts, runs, strict=True):
        ratios = run.move(measured=norm_all_reduce is not None)
        if ratios.data_ptr() != listed.ratios.data_ptr():  # else kernels have written them there
            listed.ratios[listed.places(part, listed.device)] = ratios.to(listed.ratios)
    return True


def _begin(
    rule: type[Rule],
    hyperparameters: list[dict[str, Any]],
    listed: ParameterList,
    part: ParameterBatch,
    capturable: bool,
    clip: Tensor | None,
) -> FusedRun | MultiTensorRun:
    """Count one step of the parameters of ``part``; returns the run that takes it."""
    step, device, is_fused = None, part.kind.device, part.kind.way == "fused"
    if listed.steps is not None:
        places = listed.places(part, listed.steps.device)
        listed.steps[places] += 1
        step = listed.steps[places]
    clip = None if clip is None else clip.to(device)
    on_device = is_fused or clip is not None or capturable
    place = device if on_device else torch.device("cpu")
    hyper = listed.hyper_table(hyperparameters, place)
    groups = listed.groups_of(part, place)
    if is_fused:
        ratios = listed.ratios[listed.places(part, listed.device)].to(device)
        return FusedRun(rule, part, listed.tables, groups, hyper, step, clip, ratios)
    h = dict(zip(hyperparameters[0], hyper.index_select(0, groups).unbind(1), strict=True))
    return MultiTensorRun(rule, part, StepNumbers(rule, Scalars(**h), step, clip, device))


def _reduce(vector: Tensor, norm_all_reduce: NormAllReduce | None) -> Tensor:
    if norm_all_reduce is None:
        return vector
    returned = norm_all_reduce(vector)
    return vector if returned is None else returned
