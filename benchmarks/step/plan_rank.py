"""One rank of `benchmarks/step/plan.py`: communicates as training does, and sleeps where training
would compute.

``python -m benchmarks.step.plan_rank PROFILE OUT.json TOPOLOGY STEPS WAY...`` replays the
recorded step, a number of times for each way (`benchmarks.step.plan.WAYS`), and writes the seconds
of each to OUT.json. Real gradients leave through the real reducer: a layer for each recorded
parameter sleeps in forward and, in backward, until that gradient was ready.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_ring.algorithms import algorithm_class
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.cost import default_cap_mb
from lightning_ring.gradients.compression import COMPRESSORS
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import connect
from lightning_ring.job.ranks import discover_ranks
from lightning_ring.tools.plan.inputs import Gradient, Profile, read_profile

_TIMEOUT = timedelta(seconds=60)
_WARMUP = 3  # the first backward orders buckets, the second connects
_LATE = 1e-3  # seconds that a forward may be behind without having waited


class Pace:
    """When forward and backward, had they computed, would be where they are."""

    def __init__(self) -> None:
        self.due = 0.0
        self.backward_began = 0.0

    def begin_step(self) -> None:
        self.due = time.perf_counter()

    def work(self, seconds: float) -> None:
        now = time.perf_counter()
        if now > self.due + _LATE:  # it waited for parameters, which no work made up for
            self.due = now
        self.due += seconds
        sleep_until(self.due)


def sleep_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class Produce(torch.autograd.Function):
    """The identity, with a gradient for ``weight`` that is there ``ready`` seconds after
    backward began.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Layer) -> Tensor:
        ctx.layer = layer
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        layer = ctx.layer
        sleep_until(layer.pace.backward_began + layer.ready)
        return (
            grad,
            layer.gradient.clone(),
            None,
        )  # memory of its own: ring_sharded makes a gradient that is held unreadable


class Layer(nn.Module):
    def __init__(self, gradient: Gradient, seconds: float, pace: Pace, zeros: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(gradient.numel))
        self.ready = gradient.ready
        self.seconds = seconds
        self.pace = pace
        self.gradient = zeros[: gradient.numel]

    def forward(self, x: Tensor) -> Tensor:
        self.pace.work(self.seconds)
        out: Tensor = Produce.apply(x, self.weight, self)
        return out


class SleepingOptimizer(torch.optim.Optimizer):
    """Its step takes as long as the recorded one, in proportion to what it is given."""

    elementwise = True

    def __init__(self, params: Any, seconds_an_element: float) -> None:
        super().__init__(params, {"seconds_an_element": seconds_an_element})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            num_elements = sum(param.numel() for param in group["params"] if param.grad is not None)
            time.sleep(num_elements * group["seconds_an_element"])


def build(profile: Profile, pace: Pace) -> nn.Sequential:
    """Layers in the order of forward, which is backward's, reversed; times keep their
    proportion.
    """
    phases, gradients = profile.phases, profile.gradients[::-1]
    zeros = torch.zeros(max(gradient.numel for gradient in gradients))
    nexts = [*(gradient.ready for gradient in gradients[1:]), 0.0]
    share = phases.forward / phases.backward
    return nn.Sequential(
        *(
            Layer(gradient, share * (gradient.ready - following), pace, zeros)
            for gradient, following in zip(gradients, nexts, strict=True)
        )
    )


def busy_seconds() -> float:
    """Processor time of this machine so far, over all cores and all processes, interrupts
    included (`/proc/stat`).
    """
    user, nice, system, _idle, _iowait, *interrupts = map(
        int, Path("/proc/stat").read_text().split()[1:8]
    )
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def make(way: str, cap_mb: float) -> Algorithm:
    if way == "local_sgd_8":
        return LocalSGD(8)
    compression = COMPRESSORS["bf16"].build() if way == "bf16" else None
    made: Algorithm = algorithm_class("ring" if way == "bf16" else way)(
        bucket_cap_mb=cap_mb, compression=compression
    )
    return made


def replay(profile: Profile, comm: Communicator, way: str, steps: int) -> tuple[list[float], float]:
    """Seconds of each step, and processor seconds a step of all ranks together."""
    phases, pace = profile.phases, Pace()
    model = build(profile, pace)
    num_elements = sum(gradient.numel for gradient in profile.gradients)
    optimizer = SleepingOptimizer(model.parameters(), phases.optimizer / num_elements)
    cap = default_cap_mb("cpu", comm.world_size)
    algorithm = make(way, cap)
    algorithm.attach(model, [optimizer], comm, print)
    if isinstance(algorithm, Sharded):
        algorithm.overlaps = True
    seconds = []
    x = torch.zeros(1, requires_grad=True)
    for number in range(_WARMUP + steps):
        if number == _WARMUP:
            comm.barrier()
            busy = busy_seconds()
        began = time.perf_counter()
        time.sleep(phases.data + phases.copy + phases.other)
        pace.begin_step()
        algorithm.begin_batch()
        with algorithm.forward():
            loss = model(x)
        pace.backward_began = time.perf_counter()
        with algorithm.backward():
            loss.backward()
        algorithm.before_step(optimizer, has_closure=False)
        optimizer.step()
        algorithm.after_step(optimizer)
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    comm.barrier()
    busy = busy_seconds() - busy
    algorithm.detach()
    return seconds[_WARMUP:], busy / steps


def main(path: str, out: str, topology: str, steps: str, *ways: str) -> None:
    torch.set_num_threads(1)
    profile = read_profile(path)
    info = discover_ranks()
    cpu = torch.device("cpu")
    job = connect(info, cpu, _TIMEOUT)
    comm = open_communicator(job, "auto", cpu, _TIMEOUT, _TIMEOUT, topology)
    found = {}
    for way in ways:
        everyones = comm.all_gather_object(replay(profile, comm, way, int(steps)))
        times, (busy, *_) = zip(*everyones, strict=True)
        found[way] = [max(step) for step in zip(*times, strict=True)], busy
    if info.rank == 0:
        Path(out).write_text(json.dumps(found))
    comm.barrier()  # a rank that ended now would be taken for one that failed
    comm.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
