"""A profile of the study's training on one rank, as `RingProfile` records it of a Trainer's."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ring.tools.plan.profile import Gradient, Model, Phases, Profile, Run, fingerprint

WARM_UP, STEPS = 6, 20


def measured_step(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, Tensor]],
    num_ranks: int = 1,
) -> Profile:
    """Seconds of a step's phases, and when backward has each gradient: medians, of copies of
    both arguments.
    """
    module = copy.deepcopy(module)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer = torch.optim.SGD(module.parameters(), **settings)
    clock, began = time.perf_counter, 0.0
    ready: dict[str, list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)

    def note(name: str, _: Tensor) -> None:
        ready[name].append(clock() - began)

    for name, param in module.named_parameters():
        param.register_post_accumulate_grad_hook(partial(note, name))
    for _ in range(WARM_UP + STEPS):
        marks = [clock()]
        images, labels = next(batches)
        marks.append(clock())
        loss = F.cross_entropy(module(images), labels)
        marks.append(clock())
        began = marks[-1]
        loss.backward()
        marks.append(clock())
        optimizer.step()
        marks.append(clock())
        optimizer.zero_grad()
        marks.append(clock())
        for phase, (before, after) in zip(_PHASES, pairwise(marks), strict=True):
            times[phase].append(after - before)
    steps = {phase: median(values[WARM_UP:]) for phase, values in times.items()}
    total = median(sum(values) for values in list(zip(*times.values(), strict=True))[WARM_UP:])
    phases = Phases(copy=0.0, exposed=0.0, total=total, **steps)
    parameters = list(module.named_parameters())
    gradients = [_gradient(name, param, ready[name][WARM_UP:]) for name, param in parameters]
    digest = fingerprint((name, tuple(param.shape), str(param.dtype)) for name, param in parameters)
    return Profile(
        Model(type(module).__name__, digest, sum(param.numel() for _, param in parameters)),
        Run(num_ranks, num_ranks, "cpu", len(labels), STEPS),
        phases,
        tuple(sorted(gradients, key=lambda gradient: gradient.ready)),
    )


_PHASES = ("data", "forward", "backward", "optimizer", "other")


def _gradient(name: str, param: Tensor, ready: list[float]) -> Gradient:
    return Gradient(
        name, param.numel(), "float32", 4 * param.numel(), median(ready), tuple(param.shape)
    )
