"""The study of wires: ``python -m benchmarks.wires.study --help``."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from benchmarks.hosts import why_not
from benchmarks.wires.predict import predicted_seconds
from benchmarks.wires.report import Cell, cell_of, plot, seconds_until, tables
from benchmarks.wires.run import Method, Run, Settings, bits_per_second, execute
from lightning_ring.tools.plan.profile import Profile, profile_of
from recipes.record import Result, finish


def study(config: dict[str, Any], folder: Path) -> str:
    """Do every run that is not on record yet, and write tables and picture of all that are.
    Returns the tables.
    """
    settings, target, baseline = (
        Settings(**config["settings"]),
        config["target"],
        config["baseline"],
    )
    methods = {name: Method(**method) for name, method in config["methods"].items()}
    wires = [(rate, False) for rate in config["rates"]] + [
        (rate, True) for rate in config["straggler_rates"]
    ]
    asked = [methods[name] for name in config["only"] or methods]

    def line(result: Result) -> str:
        if "profile" in result:
            return f"{result['rate']}: a profile for the predictions"
        return (
            f"{result['rate']}{', slow rank' if result['straggler'] else ''}: {result['method']}, "
            f"seed {result['seed']}: {seconds_until(result['curve'], target):.1f} s to {target}, "
            f"accuracy {result['accuracy']:.4f}, {result['bytes_per_step'] / 1e3:,.0f} kB a step"
        )

    # a seed of everything first: a study that is interrupted has a table of all methods
    runs = [Run(None, rate, False, 0) for rate in dict.fromkeys(rate for rate, _ in wires)]
    runs += [
        Run(method, *wire, seed)
        for seed in sorted(config["seeds"])
        for wire in wires
        for method in asked
    ]
    by_key = {run.key(settings): run for run in runs}
    record = finish(
        by_key, partial(execute, settings=settings), line, folder / "runs.jsonl", workers=1
    )
    cells = cells_on_record(record, list(methods.values()), settings, target)
    found = tables(cells, baseline)
    (folder / "wires.md").write_text(found)
    if cells:
        plot(cells, baseline, folder / "wires.png")
    return found


def cells_on_record(
    record: Mapping[str, Result], methods: Sequence[Method], settings: Settings, target: float
) -> list[Cell]:
    """Of ``methods``, as they are now, on each wire all seeds. Slow wires come first, those with
    a slow rank last.
    """
    wires = {(result["straggler"], result["rate"]) for result in record.values()}
    seeds = sorted({result["seed"] for result in record.values()})
    profiles = _profiles(record, {rate for _, rate in wires}, settings)
    cells = []
    for straggler, rate in sorted(wires, key=lambda wire: (wire[0], bits_per_second(wire[1]))):
        for method in methods:
            keys = [Run(method, rate, straggler, seed).key(settings) for seed in seeds]
            if found := [record[key] for key in keys if key in record]:
                batch_seconds = statistics.median(result["batch_seconds"] for result in found)
                predicted = None
                if (profile := profiles.get(rate)) is not None:
                    predicted = predicted_seconds(
                        method, profile, straggler, settings, batch_seconds
                    )
                cells.append(cell_of(found, target, predicted))
    return cells


def _profiles(
    record: Mapping[str, Result], rates: Iterable[str], settings: Settings
) -> dict[str, Profile]:
    keys = {rate: Run(None, rate, False, 0).key(settings) for rate in rates}
    found = {
        rate: profile_of(record[key]["profile"]) for rate, key in keys.items() if key in record
    }
    # what a short call costs among ranks that compute does not depend on the rate: a median is less
    # noisy
    calls = [profile.call for profile in found.values() if profile.call is not None]
    call = statistics.median(calls) if calls else None
    return {rate: replace(profile, call=call) for rate, profile in found.items()}


@hydra.main(version_base="1.3", config_path=".", config_name="wires")
def main(config: DictConfig) -> None:
    if reason := why_not():
        sys.exit(f"The study needs hosts of its own on this machine: {reason}.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    given = {str(name): value for name, value in container.items()}
    print(
        f"\n{study(given, folder)}\n{folder}/wires.md, wires.png; every run is a line of runs.jsonl"
    )


if __name__ == "__main__":
    main()
