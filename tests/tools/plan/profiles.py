"""Profiles and links for tests."""

from lightning_ring.comm.cost import CostModel
from lightning_ring.tools.plan.inputs import Gradient, Phases, Profile, Run
from lightning_ring.tools.plan.model import Link

MIB = 2**20


def gradient(name, mib, ready, dtype="float32"):
    size = {"float32": 4, "float64": 8, "bfloat16": 2}[dtype]
    numel = int(mib * MIB) // size
    return Gradient(name, numel, dtype, numel * size, ready)


def profile(
    *gradients,
    forward=0.05,
    backward=0.1,
    optimizer=0.01,
    data=0.0,
    other=0.0,
    run=None,
):
    phases = Phases(data, 0.0, forward, backward, optimizer, other)
    run = run or Run(1, 1, "cpu", 10, "Net", 1000)
    return Profile(run, phases, gradients)


def link(alpha_us=50, gbytes=1.0):
    return Link.of("test", CostModel(alpha_us * 1e-6, gbytes * 1e9))


def several(count=12, backward=0.1):
    """Gradients of 0.2 to 9 MiB, at uneven times; the last one ends backward."""
    sizes = [0.2, 3.0, 0.7, 9.0, 1.0, 2.5]
    ready = [backward * ((index + 1) / count) ** 1.5 for index in range(count)]
    return [gradient(f"p{index}", sizes[index % 6], ready[index]) for index in range(count)]
