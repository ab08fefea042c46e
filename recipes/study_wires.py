"""The study of wires: ``python recipes/study_wires.py --help``."""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

if not __package__:  # run as a script: make `recipes` importable, instead of this folder's modules at the top level
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks.hosts import why_not
from lightning_ring.tools.plan.profile import profile_of
from recipes.study.record import Result, finish
from recipes.wires.predict import predicted_seconds
from recipes.wires.report import cell_of, plot, seconds_until, step_table, table
from recipes.wires.run import Method, Run, Settings, execute


def study(config: dict[str, Any], folder: Path) -> str:
    """Do every run that is not on record yet, and write tables and picture. Returns the tables."""
    settings, target = Settings(**config["settings"]), config["target"]
    methods = [Method(**config["methods"][name]) for name in config["only"] or config["methods"]]
    wires = [(rate, False) for rate in config["rates"]] + [(rate, True) for rate in config["straggler_rates"]]
    groups = [
        (method, [Run(method, rate, straggler, seed) for seed in config["seeds"]])
        for rate, straggler in wires
        for method in methods
    ]

    def line(result: Result) -> str:
        if "profile" in result:
            return f"{result['rate']}: a profile for the predictions"
        return (
            f"{result['rate']}{', slow rank' if result['straggler'] else ''}: {result['method']}, seed "
            f"{result['seed']}: {seconds_until(result['curve'], target):.1f} s to {target}, "
            f"accuracy {result['accuracy']:.4f}, {result['bytes_per_step'] / 1e3:,.0f} kB a step"
        )

    # a seed of everything first: a study that is interrupted has a table of all methods
    profiles = {rate: Run(None, rate, False, 0) for rate, _ in wires}
    runs = [*profiles.values(), *sorted((run for _, group in groups for run in group), key=lambda run: run.seed)]
    by_key = {run.key(settings): run for run in runs}
    results = finish(by_key, partial(execute, settings=settings), line, folder / "runs.jsonl", workers=1)
    measured = {rate: profile_of(results[run.key(settings)]["profile"]) for rate, run in profiles.items()}
    # what a short call costs among ranks that compute does not depend on the rate: a median is less noisy
    calls = [profile.call for profile in measured.values() if profile.call is not None]
    if calls:
        measured = {rate: replace(profile, call=statistics.median(calls)) for rate, profile in measured.items()}
    cells = []
    for method, group in groups:
        found, profile = [results[run.key(settings)] for run in group], measured[group[0].rate]
        batch_seconds = statistics.median(result["batch_seconds"] for result in found)
        predicted = predicted_seconds(method, profile, group[0].straggler, settings, batch_seconds)
        cells.append(cell_of(found, target, predicted))
    baseline = config["baseline"]
    tables = f"{table(cells, baseline)}\n{step_table(cells)}"
    (folder / "wires.md").write_text(tables)
    plot(cells, baseline, folder / "wires.png")
    return tables


@hydra.main(version_base="1.3", config_path="../configs", config_name="wires")
def main(config: DictConfig) -> None:
    if reason := why_not():
        sys.exit(f"The study needs hosts of its own on this machine: {reason}.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    given = {str(name): value for name, value in container.items()}
    print(f"\n{study(given, folder)}\n{folder}/wires.md, wires.png; every run is a line of runs.jsonl")


if __name__ == "__main__":
    main()
