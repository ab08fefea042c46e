"""One step over all parameters: measure, sum over ranks, move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import send
from lightning_ring.optim.engine.fused import FusedRunner
from lightning_ring.optim.engine.parameter_list import ParameterBatch, ParameterList, TensorKind
from lightning_ring.optim.engine.plain import PlainRunner
from lightning_ring.optim.engine.rule import (
    Rule,
    Scalars,
    StepNumbers,
    known_on_host,
    step_scalars,
)
from lightning_ring.optim.engine.runners import RunOptions

NormAllReduce = Callable[[Tensor], Tensor | None]
Run = tuple[PlainRunner, ParameterBatch]


def update(
    rule: type[Rule],
    hyperparameters: list[dict[str, Any]],
    listed: ParameterList,
    runs: list[Run],
    options: RunOptions,
    norm_all_reduce: NormAllReduce | None,
) -> bool:
    """Take one step; returns whether it was taken: not where ``skip_nonfinite`` found a NaN or an
    infinity.

    ``hyperparameters`` are one dict for each group.
    """
    clip: Tensor | None = None
    if options.max_grad_norm is not None or options.skip_nonfinite:
        grad_norm = _grad_norm(listed, runs, norm_all_reduce)
        if options.skip_nonfinite and not grad_norm.isfinite():
            return False
        if options.max_grad_norm is not None:
            clip = (grad_norm / options.max_grad_norm).clamp(min=1)
    active = _active(listed, runs)
    step = None if listed.steps is None else listed.steps + (1.0 if active is None else active)
    kernels = _kernels_of_numbers(listed, runs)
    if kernels is None:
        on_device = clip is not None or options.capturable
        h = _per_parameter(hyperparameters, listed, on_device)
        numbers = _numbers(rule, h, step, clip, listed.device)
    else:
        runner, kind = kernels
        ratios = listed.ratios if active is None else torch.empty_like(listed.ratios)
        numbers = runner.numbers(kind, hyperparameters, listed, step, clip, ratios)

    def move(runs: list[Run], sums: Tensor) -> Tensor:
        """Move the parameters of ``runs`` by the trust ratios that follow from ``sums``; returns
        all ratios.
        """
        ratio, extended = numbers.after(rule, sums)
        for runner, part in runs:
            runner.move(part, extended)
        return ratio

    sums: Tensor | None = None
    if norm_all_reduce is None:
        for wave in [[(runner, wave)] for runner, part in runs for wave in runner.waves(part)]:
            sums = _measure(listed, wave, numbers, sums)
            ratio = move(wave, sums)
    else:
        sums = _measure(listed, runs, numbers, None)
        ratio = move(runs, _reduce(sums.view(-1), norm_all_reduce).view_as(sums))
    _commit(listed, ratio, step, active)
    return True


def _kernels_of_numbers(
    listed: ParameterList, runs: list[Run]
) -> tuple[FusedRunner, TensorKind] | None:
    """A runner whose kernels compute the numbers, if all parameters are on one device and in such
    runners' hands.
    """
    found = None
    for runner, part in runs:
        if not isinstance(runner, FusedRunner) or part.kind.device != listed.device:
            return None
        found = runner, part.kind
    return found


def _measure(
    listed: ParameterList, runs: list[Run], numbers: StepNumbers, sums: Tensor | None
) -> Tensor:
    """``sums`` (zeros if None) with those over the parameters of ``runs`` filled in; see
    `PlainRunner.measure`.
    """
    count, dtype = len(listed.params), listed.ratios.dtype
    found = [
        runner.measure(part, numbers).to(listed.device, dtype).contiguous() for runner, part in runs
    ]
    if [len(part.positions) for _, part in runs] == [count]:
        return found[0]
    if sums is None:
        sums = torch.zeros(2, count, dtype=dtype, device=listed.device)
    for (_, part), part_sums in zip(runs, found, strict=True):
        sums.index_copy_(1, listed.index(part.positions), part_sums)
    return sums


def _active(listed: ParameterList, runs: list[Run]) -> Tensor | None:
    """1 for each parameter that has a gradient and 0 elsewhere, like ``listed.steps``; None if
    all have one.
    """
    positions = [position for _, part in runs for position in part.positions]
    if len(positions) == len(listed.params):
        return None
    active = torch.zeros(len(listed.params))
    active[positions] = 1
    device = listed.device if listed.steps is None else listed.steps.device
    return listed.tables.get("active", positions, device, lambda: active)


def _per_parameter(
    hyperparameters: list[dict[str, Any]], listed: ParameterList, on_device: bool
) -> Scalars:
    """Each hyper-parameter as a float64 vector over the parameters."""
    device = listed.device if on_device else torch.device("cpu")
    names = list(hyperparameters[0])
    tensors = {name: [group[name] for group in hyperparameters] for name in names}
    plain = [
        name for name in names if not any(isinstance(value, Tensor) for value in tensors[name])
    ]
    rows = [[float(v) for v in tensors[name]] for name in plain]
    kept = not on_device and plain == names
    if kept and listed.spread is not None and listed.spread[0] == rows:
        return Scalars(**listed.spread[1])
    table = listed.table(rows, device)
    expanded = dict(zip(plain, listed.expand(table, device).unbind(), strict=True))
    for name in names:
        if name not in expanded:
            values = [
                torch.as_tensor(v, dtype=torch.float64).reshape(()).to(device)
                for v in tensors[name]
            ]
            expanded[name] = listed.expand(torch.stack(values), device)
    if kept:
        listed.spread = (rows, expanded)
    return Scalars(**expanded)


def _numbers(
    rule: type[Rule], h: Scalars, step: Tensor | None, clip: Tensor | None, device: torch.device
) -> StepNumbers:
    if step is not None:
        step = send(step.double(), h.lr.device)
    scalars = step_scalars(rule, h, step, clip)
    if h.lr.device.type == "cpu":
        return known_on_host(scalars, device)
    return StepNumbers(vars(scalars), {})


def _grad_norm(
    listed: ParameterList, runs: list[Run], norm_all_reduce: NormAllReduce | None
) -> Tensor:
    """Norm of all gradients of all ranks together, 0-d. It is finite where all of them are."""
    squares = torch.zeros(1, dtype=listed.ratios.dtype, device=listed.device)
    for runner, part in runs:
        squares += runner.grad_square_sum(part).to(listed.device)
    return _reduce(squares, norm_all_reduce)[0].sqrt()


def _reduce(vector: Tensor, norm_all_reduce: NormAllReduce | None) -> Tensor:
    if norm_all_reduce is None:
        return vector
    returned = norm_all_reduce(vector)
    return vector if returned is None else returned


def _commit(
    listed: ParameterList, ratio: Tensor, step: Tensor | None, active: Tensor | None
) -> None:
    """Write step counts and ratios, as far as parameters were active."""
    if step is not None and listed.steps is not None:
        listed.steps.copy_(step)
    if active is not None:
        ratio = torch.where(send(active, ratio.device) != 0, ratio, listed.ratios)
    if ratio is not listed.ratios:
        listed.ratios.copy_(ratio)
