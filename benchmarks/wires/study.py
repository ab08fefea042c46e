"""The study of wires: ``python -m benchmarks.wires.study --help``."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from benchmarks.hosts import open_hosts, why_not
from benchmarks.wires.report import Cell, cell_of, plot, seconds_until, tables
from recipes.record import Result, finish


@dataclass(frozen=True, slots=True)
class Method:
    """A way to keep the ranks' models together, and what its SGD takes: momentum, and factors of
    the study's settings.

    ``distribute`` holds arguments of `lightning_ring.distribute`, nodes of Hydra among them. `None`
    is torch's own DistributedDataParallel over Gloo. With ``own_pace`` a slow rank takes fewer of
    the ranks' steps than the others.
    """

    label: str
    distribute: dict[str, Any] | None
    momentum: float = 0.9
    lr_factor: float = 1.0
    weight_decay_factor: float = 1.0
    own_pace: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a study share.

    Attributes:
        hosts, ranks: One rank a host if both are equal; the ranks share this machine's cores.
        images: Of the training set.
        batch_size: Of each rank.
        hidden: Width of the two hidden layers. It sets how many bytes a step sends.
        eval_every: Steps between two evaluations, whose time does not count.
        seconds: A run is ended when its training has taken so long.
    """

    hosts: int
    ranks: int
    images: int
    batch_size: int
    hidden: int
    steps: int
    lr: float
    warmup_steps: int
    weight_decay: float
    eval_every: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    """What sets one run apart. ``rate`` of the wire as tc writes it; a ``straggler`` takes twice as
    long a batch.
    """

    method: Method
    rate: str
    straggler: bool
    seed: int

    def key(self, settings: Settings) -> str:
        """Equal for runs that would do the same, whatever they are called."""
        method = self.method
        trained = [method.momentum, method.lr_factor, method.weight_decay_factor]
        how = [method.distribute, *trained, method.own_pace]
        text = json.dumps(
            [asdict(settings), how, self.rate, self.straggler, self.seed],
            sort_keys=True,
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def bits_per_second(rate: str) -> float:
    """Of a ``rate`` as tc writes it, "1.5gbit"."""
    found = re.fullmatch(r"([\d.]+)([kmgt]?)bit", rate.lower())
    assert found is not None, f"{rate!r} is no rate of a wire, such as 100mbit"
    return float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")


def execute(run: Run, settings: Settings) -> dict[str, Any]:
    """Train on hosts of this machine's own network. Returns a line of the record.

    Raises:
        RuntimeError: There can be no such hosts here, or the ranks failed.
    """
    started = time.perf_counter()
    label = run.method.label
    with tempfile.TemporaryDirectory() as folder, open_hosts(settings.hosts, run.rate) as hosts:
        order, result = Path(folder, "order.json"), Path(folder, "result.json")
        address = hosts.address(hosts.names[0])
        given = asdict(run) | {"address": address}
        order.write_text(json.dumps(given | {"settings": asdict(settings), "result": str(result)}))
        command = hosts.mpirun(
            settings.ranks, sys.executable, "-m", "benchmarks.wires.rank", str(order)
        )
        limit = 4 * settings.seconds + 120
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        if done.returncode or not result.exists():
            raise RuntimeError(
                f"{label} at {run.rate} failed:\n{(done.stdout + done.stderr)[-4000:]}"
            )
        found = json.loads(result.read_text())
    about = {
        "key": run.key(settings),
        "method": label,
        "rate": run.rate,
        "straggler": run.straggler,
    }
    return about | {"seed": run.seed} | found | {"seconds": round(time.perf_counter() - started, 1)}


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
        return (
            f"{result['rate']}{', slow rank' if result['straggler'] else ''}: {result['method']}, "
            f"seed {result['seed']}: {seconds_until(result['curve'], target):.1f} s to {target}, "
            f"accuracy {result['accuracy']:.4f}, {result['bytes_per_step'] / 1e3:,.0f} kB a step"
        )

    # a seed of everything first: a study that is interrupted has a table of all methods
    runs = [
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
    cells = []
    for straggler, rate in sorted(wires, key=lambda wire: (wire[0], bits_per_second(wire[1]))):
        for method in methods:
            keys = [Run(method, rate, straggler, seed).key(settings) for seed in seeds]
            if found := [record[key] for key in keys if key in record]:
                cells.append(cell_of(found, target))
    return cells


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
