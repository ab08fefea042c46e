"""One step over all parameters: measure, sum over ranks, move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import send
from lightning_ring.optim.engine.parameter_list import ParameterBatch, ParameterList
from lightning_ring.optim.engine.plain import PlainRunner
from lightning_ring.optim.engine.rule import Rule, Scalars, StepNumbers, known_on_host
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
    h = _per_parameter(hyperparameters, listed, on_device=clip is not None or options.capturable)
    numbers = _numbers(rule, h, step, clip, listed.device)

    sums = torch.zeros(2, len(listed.params), dtype=listed.ratios.dtype, device=listed.device)

    def measure(runs: list[Run]) -> None:
        """Fill in ``sums`` over each parameter; see `PlainRunner.measure`."""
        for runner, part in runs:
            part_sums = runner.measure(part, numbers).to(listed.device, sums.dtype)
            if len(part.positions) == len(listed.params):
                sums.copy_(part_sums)
            else:
                sums.index_copy_(1, listed.index(part.positions), part_sums)

    def move(runs: list[Run], sums: Tensor) -> Tensor:
        """Move the parameters of ``runs`` by the trust ratios that follow from ``sums``; returns
        all ratios.
        """
        w_norm, norm = sums[0].sqrt(), sums[1].sqrt()
        known = Scalars(**numbers.on_device)
        adapts = (w_norm > 0) & (norm > 0) & (known.adapt != 0)
        ratio = torch.where(adapts, rule.trust_ratio(w_norm, norm, known), 1.0)
        extended = numbers.extended(rule.rates(ratio, known))
        for runner, part in runs:
            runner.move(part, extended)
        return ratio

    if norm_all_reduce is None:
        for wave in [[(runner, wave)] for runner, part in runs for wave in runner.waves(part)]:
            measure(wave)
            ratio = move(wave, sums)
    else:
        measure(runs)
        ratio = move(runs, _reduce(sums.view(-1), norm_all_reduce).view_as(sums))
    _commit(listed, ratio, step, active)
    return True


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
    kept = not on_device and plain == names and not torch.compiler.is_compiling()
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
    grad_scale = 1 - 2 * h.maximize
    if clip is not None:
        grad_scale = grad_scale / clip
    if step is not None:
        step = send(step.double(), h.lr.device)
    scalars = rule.scalars(h, step, grad_scale)
    scalars.adapt = h.adapt
    if h.lr.device.type == "cpu" and not torch.compiler.is_compiling():
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
    listed.ratios.copy_(ratio)
