"""The tables and the picture of the study of wires."""

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
        target_seconds: Training time until the target accuracy; infinite where a run did not reach
            it.
    """

    method: str
    rate: str
    straggler: bool
    target_seconds: tuple[float, ...]
    accuracies: tuple[float, ...]
    kilobytes_per_step: float

    @property
    def wire(self) -> str:
        return f"{self.rate}{', slow rank' if self.straggler else ''}"

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.target_seconds)


def seconds_until(curve: Sequence[Sequence[float]], target: float) -> float:
    """Training time of the first evaluation with an accuracy of ``target`` or more."""
    return next((seconds for seconds, accuracy in curve if accuracy >= target), float("inf"))


def cell_of(results: Sequence[dict[str, Any]], target: float) -> Cell:
    """Of the results of all seeds."""
    first = results[0]
    return Cell(
        method=first["method"],
        rate=first["rate"],
        straggler=first["straggler"],
        target_seconds=tuple(seconds_until(result["curve"], target) for result in results),
        accuracies=tuple(result["accuracy"] for result in results),
        kilobytes_per_step=statistics.median(result["bytes_per_step"] for result in results) / 1e3,
    )


def tables(cells: Sequence[Cell], baseline: str) -> str:
    """Markdown: times to the target of equal ranks, and of those with a slow one."""
    halves = [
        [cell for cell in cells if cell.straggler is straggler] for straggler in (False, True)
    ]
    return "\n".join(table(half, baseline) for half in halves if half)


def table(cells: Sequence[Cell], baseline: str) -> str:
    """Markdown: a row a method; a column a wire, of seconds to the target, and their share of
    ``baseline``'s there.

    Bytes and accuracies are those of all wires and seeds. The last row has the number of seeds.
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
    return _markdown([*lines, ["seeds", "", "", *(_num_seeds(cells, wire) for wire in wires)]])


def _num_seeds(cells: Sequence[Cell], wire: str) -> str:
    numbers = [len(cell.accuracies) for cell in cells if cell.wire == wire]
    least, most = min(numbers), max(numbers)
    return f"{most}" if least == most else f"{least} to {most}"


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


def plot(cells: Sequence[Cell], baseline: str, file: Path) -> None:
    """Per rate a bar a method, and a paler one with a slow rank: time to the target accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

    rates = list(dict.fromkeys(cell.rate for cell in cells))
    methods = list(dict.fromkeys(cell.method for cell in cells))
    kinds = sorted({cell.straggler for cell in cells})
    thickness = 0.8 / len(kinds)

    def draw(axis: Axes, cell: Cell) -> None:
        at = (
            methods.index(cell.method)
            + (kinds.index(cell.straggler) - (len(kinds) - 1) / 2) * thickness
        )
        times = [seconds for seconds in cell.target_seconds if seconds < float("inf")]
        if len(times) < len(cell.target_seconds):
            axis.text(0, at, " not reached", va="center", fontsize=7)
            return
        color = "tab:gray" if cell.method == baseline else "tab:blue"
        axis.barh(
            at, cell.median_seconds, thickness, color=color, alpha=0.45 if cell.straggler else 1
        )
        axis.plot([min(times), max(times)], [at, at], color="black", linewidth=1)

    height = (0.2 + 0.14 * len(kinds)) * len(methods) + 1.6
    figure, axes = plt.subplots(
        1,
        len(rates),
        figsize=(3.2 * len(rates) + 1.5, height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis, rate in zip(axes[0], rates, strict=True):
        for cell in cells:
            if cell.rate == rate:
                draw(axis, cell)
        axis.set_title(rate)
        axis.set_xlabel("s to target accuracy")
        axis.set_yticks(range(len(methods)), methods)
        axis.set_ylim(len(methods) - 0.5, -0.5)
        axis.grid(axis="x", alpha=0.3)
    if len(kinds) > 1:
        names = {"equal ranks": 1.0, "with a slow rank": 0.45}
        patches = [
            Patch(color="tab:blue", alpha=alpha, label=name) for name, alpha in names.items()
        ]
        figure.legend(handles=patches, loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
