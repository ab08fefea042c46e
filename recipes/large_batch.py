"""The large-batch study: ``python recipes/large_batch.py --help``."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

# run as a script: make `recipes` importable, instead of this folder's modules at the top level
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from recipes.study.record import Result, finish
from recipes.study.report import Cell, plot, table
from recipes.study.run import Method, Run, Settings, execute


def study(config: dict[str, Any], folder: Path) -> list[Cell]:
    """Choose each cell's learning rate on the validation images, train every seed with it, test,
    write the report.
    """
    settings = Settings(**{name: freeze(value) for name, value in config["settings"].items()})
    methods = [
        Method(**{name: freeze(value) for name, value in node.items()})
        for node in config["methods"].values()
    ]
    record = folder / "runs.jsonl"

    def finished(groups: list[list[Run]]) -> dict[str, Result]:
        # small batches take longest
        runs = sorted((run for group in groups for run in group), key=lambda run: run.batch_size)
        by_key = {run.key(settings): run for run in runs}
        return finish(by_key, partial(execute, settings=settings), line, record, config["workers"])

    tuning = [
        [Run(method, size, lr, config["tuning_seed"], "val") for lr in method.base_lrs]
        for method in methods
        for size in config["batch_sizes"]
    ]
    results = finished(tuning)
    chosen = [best(runs, settings, results) for runs in tuning]
    tests = [[replace(run, seed=seed, part="test") for seed in config["seeds"]] for run in chosen]
    results = finished(tests)
    cells = [summary(runs, settings, results) for runs in tests]
    (folder / "large_batch.md").write_text(table(cells))
    plot(cells, folder / "large_batch.png")
    return cells


def line(result: Result) -> str:
    return (
        f"{result['part']}: {result['method']}, batch {result['batch_size']}, lr "
        f"{result['lr']:.4g}, seed {result['seed']}: accuracy {result['accuracy']:.4f} "
        f"({result['steps']} steps, {result['seconds']} s)"
    )


def freeze(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def best(runs: Iterable[Run], settings: Settings, results: dict[str, Result]) -> Run:
    """The run of highest validation accuracy; of equals, the one of lower training loss."""

    def merit(run: Run) -> tuple[float, float]:
        result = results[run.key(settings)]
        return result["accuracy"], -(
            result["train_loss"] if result["train_loss"] is not None else float("inf")
        )

    return max(runs, key=merit)


def summary(runs: list[Run], settings: Settings, results: dict[str, Result]) -> Cell:
    first, done = runs[0], [results[run.key(settings)] for run in runs]
    lrs = first.method.base_lrs
    return Cell(
        method=first.method.label,
        batch_size=first.batch_size,
        steps=done[0]["steps"],
        lr=first.lr(settings),
        at_edge=first.base_lr in (min(lrs), max(lrs)),
        accuracies=tuple(result["accuracy"] for result in done),
    )


@hydra.main(version_base="1.3", config_path="../configs", config_name="large_batch")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    cells = study({str(name): value for name, value in container.items()}, folder)
    print(
        f"\n{table(cells)}\n{folder}/large_batch.md, large_batch.png; every run is a line of "
        "runs.jsonl"
    )


if __name__ == "__main__":
    main()
