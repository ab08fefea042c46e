"""The table and the picture of the study of wires."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one wire, over the seeds.

    Attributes:
        target_seconds: Training time until the target accuracy; infinite where a run did not reach it.
        predicted_milliseconds: Of a step, as `lightning-ring plan` has it; `None` if it cannot.
    """

    method: str
    wire: str
    target_seconds: tuple[float, ...]
    accuracies: tuple[float, ...]
    kilobytes_per_step: float
    milliseconds_per_step: float
    predicted_milliseconds: float | None = None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.target_seconds)


def seconds_until(curve: Sequence[Sequence[float]], target: float) -> float:
    """Training time of the first evaluation with an accuracy of ``target`` or more."""
    return next((seconds for seconds, accuracy in curve if accuracy >= target), float("inf"))


def cell_of(results: Sequence[dict[str, Any]], target: float, predicted: float | None = None) -> Cell:
    """``results`` are those of all seeds; ``predicted`` seconds of a step."""
    first = results[0]
    return Cell(
        method=first["method"],
        wire=f"{first['rate']}{', slow rank' if first['straggler'] else ''}",
        target_seconds=tuple(seconds_until(result["curve"], target) for result in results),
        accuracies=tuple(result["accuracy"] for result in results),
        kilobytes_per_step=statistics.median(result["bytes_per_step"] for result in results) / 1e3,
        milliseconds_per_step=statistics.median(1e3 * result["curve"][-1][0] / result["steps"] for result in results),
        predicted_milliseconds=None if predicted is None else 1e3 * predicted,
    )


def table(cells: Sequence[Cell], baseline: str) -> str:
    """Markdown: a row a method and wire, in the order given; times also as a share of ``baseline``'s on that wire."""
    lines = [
        ["wire", "method", "s to target", f"of {baseline}", "ms a step", "predicted", "kB a step", "test accuracy, %"]
    ]
    lines.append(["---"] * len(lines[0]))
    of_baseline = {cell.wire: cell.median_seconds for cell in cells if cell.method == baseline}
    for cell in cells:
        seconds = cell.median_seconds
        reached = seconds < float("inf")
        share = seconds / of_baseline[cell.wire] if reached and cell.wire in of_baseline else float("nan")
        mean = 100 * statistics.mean(cell.accuracies)
        spread = 100 * statistics.stdev(cell.accuracies) if len(cell.accuracies) > 1 else 0.0
        lines.append(
            [
                cell.wire,
                cell.method,
                f"{seconds:.1f}" if reached else "not reached",
                f"{share:.2f}" if share == share and share != 0 else "",
                f"{cell.milliseconds_per_step:.1f}",
                _predicted(cell),
                f"{cell.kilobytes_per_step:,.0f}",
                f"{mean:.2f} ± {spread:.2f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _predicted(cell: Cell) -> str:
    """Milliseconds, and how much less or more they are than those measured."""
    if cell.predicted_milliseconds is None:
        return ""
    error = cell.predicted_milliseconds / cell.milliseconds_per_step - 1
    return f"{cell.predicted_milliseconds:.1f} ({error:+.0%})"


def plot(cells: Sequence[Cell], baseline: str, file: Path) -> None:
    """Per wire a bar a method: time to the target accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    wires = list(dict.fromkeys(cell.wire for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    figure, axes = plt.subplots(
        1, len(wires), figsize=(3.2 * len(wires) + 1.5, 0.34 * len(methods) + 1.4), sharey=True, layout="constrained"
    )
    for axis, wire in zip([axes] if len(wires) == 1 else axes, wires, strict=True):
        here = {cell.method: cell for cell in cells if cell.wire == wire}
        for number, method in enumerate(methods):
            if (cell := here.get(method)) is None:
                continue
            times = [seconds for seconds in cell.target_seconds if seconds < float("inf")]
            if len(times) < len(cell.target_seconds):
                axis.text(0, number, " not reached", va="center", fontsize=8)
                continue
            axis.barh(number, cell.median_seconds, color="tab:gray" if method == baseline else "tab:blue")
            axis.plot([min(times), max(times)], [number, number], color="black", linewidth=1)
        axis.set_title(wire)
        axis.set_xlabel("s to target accuracy")
        axis.set_yticks(range(len(methods)), methods)
        axis.invert_yaxis() if axis is (axes if len(wires) == 1 else axes[0]) else None
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=150)
    plt.close(figure)
