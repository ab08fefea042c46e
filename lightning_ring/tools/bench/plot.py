"""Bandwidth over size, one panel a collective. Needs matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.bench.names import COPY

if TYPE_CHECKING:
    from lightning_ring.tools.bench.measure import Timing


def check_plot(path: str) -> None:
    """
    Raises:
        ConfigurationError: matplotlib is not installed, or does not write such files.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "--plot needs matplotlib, which is not installed: `pip install matplotlib`. --json FILE keeps the numbers "
            "without it."
        )
    if not path.endswith((".png", ".svg", ".pdf")):
        raise ConfigurationError(f"--plot {path}: the name of the file must end in .png, .svg or .pdf.")


def plot(timings: Sequence[Timing], world_size: int, path: str) -> None:
    """Write the bus bandwidth of each backend, and the copy's, to ``path``."""
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    collectives = list(dict.fromkeys(t.collective for t in timings))
    figure = Figure(figsize=(5 * len(collectives), 4), layout="constrained")
    for number, collective in enumerate(collectives, start=1):
        axes = figure.add_subplot(1, len(collectives), number)
        here = [timing for timing in timings if timing.collective == collective]
        for backend in dict.fromkeys(timing.backend for timing in here):
            points = [(t.num_bytes, t.bus_bandwidth(world_size) / 1e9) for t in here if t.backend == backend]
            style = {"linestyle": "--", "color": "gray"} if backend == COPY else {"marker": "o", "markersize": 3}
            axes.plot(*zip(*points, strict=True), label=backend, **style)
        axes.set(title=f"{collective}, {world_size} ranks", xlabel="bytes", ylabel="bus bandwidth, GB/s")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.grid(True, which="both", alpha=0.2)
        axes.legend()
    figure.savefig(path, dpi=120)
