"""The study's table and plot."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cell:
    """One method at one batch size: its test accuracies over the seeds, at the learning rate
    that was chosen.
    """

    method: str
    batch_size: int
    steps: int
    lr: float
    at_edge: bool
    accuracies: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracies)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else 0.0


def table(cells: Sequence[Cell]) -> str:
    """Markdown: a row a method, a column a batch size; mean ± standard deviation in per cent,
    and the learning rate.
    """
    columns = {cell.batch_size: cell.steps for cell in cells}
    rows: dict[str, dict[int, str]] = {}
    for cell in cells:
        edge = "*" if cell.at_edge else ""
        text = f"{100 * cell.mean:.2f} ± {100 * cell.spread:.2f} ({cell.lr:.3g}{edge})"
        rows.setdefault(cell.method, {})[cell.batch_size] = text
    header = ["method", *(f"batch {size}, {steps:,} steps" for size, steps in columns.items())]
    lines = [header, ["---"] * len(header)]
    lines += [[method, *(row[size] for size in columns)] for method, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def plot(cells: Sequence[Cell], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for number, method in enumerate(dict.fromkeys(cell.method for cell in cells)):
        line = [cell for cell in cells if cell.method == method]
        # beside each other, so that bars can be read
        sizes = [cell.batch_size * 1.03 ** (number - 2) for cell in line]
        axes.errorbar(
            sizes,
            [100 * cell.mean for cell in line],
            yerr=[100 * cell.spread for cell in line],
            label=method,
            marker="o",
            capsize=3,
        )
    sizes = sorted({cell.batch_size for cell in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("batch size (same number of epochs)")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)
