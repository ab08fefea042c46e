"""Profiles and links for tests."""

from __future__ import annotations

from lightning_ring.comm.cost import CostModel
from lightning_ring.tools.plan.inputs import Gradient, Phases, Profile, Run
from lightning_ring.tools.plan.model import Link

MIB = 2**20


def gradient(name: str, mib: float, ready: float, dtype: str = "float32") -> Gradient:
    size = {"float32": 4, "float64": 8, "bfloat16": 2}[dtype]
    numel = int(mib * MIB) // size
    return Gradient(name, numel, dtype, numel * size, ready)


def profile(
    *gradients: Gradient,
    forward: float = 0.05,
    backward: float = 0.1,
    optimizer: float = 0.01,
    data: float = 0.0,
    other: float = 0.0,
    run: Run | None = None,
) -> Profile:
    phases = Phases(data, 0.0, forward, backward, optimizer, other)
    run = run or Run(1, 1, "cpu", 10, "Net", 1000)
    return Profile(run, phases, gradients)


def link(alpha_us: float = 50, gbytes: float = 1.0) -> Link:
    return Link.of("test", CostModel(alpha_us * 1e-6, gbytes * 1e9))


def several(count: int = 12, backward: float = 0.1) -> list[Gradient]:
    """Gradients of 0.2 to 9 MiB, at uneven times; the last one ends backward."""
    sizes = [0.2, 3.0, 0.7, 9.0, 1.0, 2.5]
    ready = [backward * ((index + 1) / count) ** 1.5 for index in range(count)]
    return [gradient(f"p{index}", sizes[index % 6], ready[index]) for index in range(count)]
