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
    """Markdown: a row a method; a column a wire, of seconds to the target, and their share of ``baseline``'s there.

    Bytes and accuracies are those of all wires and seeds.
    """
    wires, rows = _sorted_out(cells)
    lines = [["method", "kB a step", "test accuracy, %", *wires]]
    for method, row in rows.items():
        kilobytes = [cell.kilobytes_per_step for cell in row.values()]
        found = [100 * accuracy for cell in row.values() for accuracy in cell.accuracies]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        least, most = f"{min(kilobytes):,.0f}", f"{max(kilobytes):,.0f}"
        sent = f"{least} to {most}" if max(kilobytes) > 1.05 * min(kilobytes) else most
        times = [_time(row.get(wire), rows.get(baseline, {}).get(wire)) for wire in wires]
        lines.append([method, sent, f"{statistics.mean(found):.1f} ± {spread:.1f}", *times])
    return _markdown(lines)


def step_table(cells: Sequence[Cell]) -> str:
    """Markdown: milliseconds of a step, and how far the prediction is from them."""
    wires, rows = _sorted_out(cells)
    return _markdown(
        [["method", *wires], *([method, *(_step(row.get(wire)) for wire in wires)] for method, row in rows.items())]
    )


def _sorted_out(cells: Sequence[Cell]) -> tuple[list[str], dict[str, dict[str, Cell]]]:
    """All wires, and of each method its cells by wire."""
    rows: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        rows.setdefault(cell.method, {})[cell.wire] = cell
    return list(dict.fromkeys(cell.wire for cell in cells)), rows


def _markdown(lines: list[list[str]]) -> str:
    rule = ["---"] * len(lines[0])
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]]) + "\n"


def _time(cell: Cell | None, of: Cell | None) -> str:
    if cell is None:
        return ""
    seconds = cell.median_seconds
    if seconds == float("inf"):
        return "not reached"
    share = seconds / of.median_seconds if of is not None else 0.0  # of what was not reached either
    return f"{seconds:.1f} ({share:.2f})" if share else f"{seconds:.1f}"


def _step(cell: Cell | None) -> str:
    if cell is None:
        return ""
    measured, predicted = cell.milliseconds_per_step, cell.predicted_milliseconds
    return f"{measured:.1f}" + ("" if predicted is None else f" ({predicted / measured - 1:+.0%})")


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
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
    figure.savefig(file, dpi=150)
    plt.close(figure)
