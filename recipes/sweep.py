"""A sweep's table: a row for each run, the best first."""

import json
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from lightning_ring.launch.script import JobFinished
from recipes.start import place

RESULT = "result.json"
JUDGED_BY = ("test/R@1", "test/accuracy")
"""The first that the runs have sorts the table; more is better."""
_STOPPED = (130, 143)  # Ctrl-C and SIGTERM to the process that started the ranks

Row = dict[str, Any]


class SweepTable(Callback):
    """Hydra's callback; runs are read from their folders, since other processes may have run them.

    Where a launcher started several ranks, each runs the whole sweep. Only rank 0's folder is used,
    and printed.
    """

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """In a folder that is used again an old result would hide a failure."""
        (Path(config.hydra.runtime.output_dir) / RESULT).unlink(missing_ok=True)

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        if (place() or (0, 1))[0] == 0:
            folder = Path(config.hydra.sweep.dir)
            print(f"\n{table(read_rows(folder))}\n\n{folder}", flush=True)


def read_rows(folder: Path) -> list[Row]:
    """Overrides, status, seconds of training, ranks and metrics of a sweep's runs; sorted."""
    rows = []
    for file in sorted(folder.glob("*/.hydra/overrides.yaml")):
        run = file.parent.parent
        row: Row = {"overrides": " ".join(OmegaConf.load(file)), "status": "failed"}
        row["folder"] = run.name
        if (run / RESULT).exists():
            result = json.loads((run / RESULT).read_text())
            metrics = result.pop("metrics")
            row |= {"status": "finished"} | result | metrics
        rows.append(row)
    metric = judged_by(rows)
    return sorted(rows, key=lambda row: -row.get(metric, float("-inf")))


def judged_by(rows: list[Row]) -> str:
    return next((name for name in JUDGED_BY if any(name in row for row in rows)), JUDGED_BY[-1])


def table(rows: list[Row]) -> str:
    """Markdown: the overrides that differ, the metric that sorts them, and the time."""
    metric = judged_by(rows)
    every = [row["overrides"].split() for row in rows]
    lines = [["overrides", metric, "time"], ["---", "---:", "---:"]]
    for row, overrides in zip(rows, every, strict=True):
        own = " ".join(word for word in overrides if not all(word in other for other in every))
        value = f"{row[metric]:.4f}" if metric in row else row["status"]
        time = f"{row['seconds']:.1f} s" if "seconds" in row else ""
        lines.append([own or row["overrides"], value, time])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)


def goes_on_after(error: BaseException) -> bool:
    """Whether the sweep goes on with its next run. It does not among ranks that a launcher started:
    each of them runs the sweep, and the others would wait for this one.
    """
    if HydraConfig.get().mode != RunMode.MULTIRUN or place() is not None:
        return False
    if isinstance(error, SystemExit):
        return isinstance(error, JobFinished) and error.code not in _STOPPED
    return True
