"""The study of wires: ``python -m benchmarks.wires.study --help``."""

import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from recipes.record import finish, key_of, markdown
from tests.hosts import open_hosts, why_not

Settings = dict[str, Any]  # what all runs of a study share, as in wires.yaml


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
class Run:
    """What sets one run apart. ``rate`` of the wire as tc writes it; a ``straggler`` takes twice as
    long a batch.
    """

    method: Method
    rate: str
    straggler: bool
    seed: int

    def key(self, settings):
        """Equal for runs that would do the same, whatever they are called."""
        method = self.method
        trained = [method.momentum, method.lr_factor, method.weight_decay_factor]
        how = [method.distribute, *trained, method.own_pace]
        return key_of(settings, how, self.rate, self.straggler, self.seed)


def execute(run, settings):
    """Train on hosts of this machine's own network. Returns a line of the record.

    Raises `RuntimeError`: there can be no such hosts here, or the ranks failed.
    """
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, open_hosts(settings["hosts"], run.rate) as hosts:
        order, result = Path(folder, "order.json"), Path(folder, "result.json")
        given = {"address": hosts.address(hosts.names[0]), "result": str(result)}
        order.write_text(json.dumps(asdict(run) | given | {"settings": settings}))
        rank = [sys.executable, "-m", "benchmarks.wires.rank", str(order)]
        command = hosts.mpirun(settings["ranks"], *rank)
        limit = 4 * settings["seconds"] + 120
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
        if done.returncode or not result.exists():
            said = (done.stdout + done.stderr)[-4000:]
            raise RuntimeError(f"{run.method.label} at {run.rate} failed:\n{said}")
        found = json.loads(result.read_text())
    about = {"key": run.key(settings), "method": run.method.label, "rate": run.rate}
    about |= {"straggler": run.straggler, "seed": run.seed}
    return about | found | {"seconds": round(time.perf_counter() - started, 1)}


def study(config, folder):
    """Do every run that is not on record yet; write and return the tables of all that are."""
    settings, target = config["settings"], config["target"]
    methods = {name: Method(**method) for name, method in config["methods"].items()}
    wires = [(rate, False) for rate in config["rates"]]
    wires += [(rate, True) for rate in config["straggler_rates"]]
    # a seed of everything first: a study that is interrupted has a table of all methods
    runs = [
        Run(methods[name], *wire, seed)
        for seed in sorted(config["seeds"])
        for wire in wires
        for name in config["only"] or methods
    ]
    by_key = {run.key(settings): run for run in runs}
    work, file = partial(execute, settings=settings), folder / "runs.jsonl"
    record = finish(by_key, work, partial(line, target=target), file, workers=1)
    cells = cells_on_record(record, list(methods.values()), settings, target)
    found = tables(cells, config["baseline"])
    (folder / "wires.md").write_text(found)
    return found


def line(result, target):
    until = f"{seconds_until(result['curve'], target):.1f} s to {target}"
    said = f"accuracy {result['accuracy']:.4f}, {result['bytes_per_step'] / 1e3:,.0f} kB a step"
    return f"{wire_of(result)}: {result['method']}, seed {result['seed']}: {until}, {said}"


# -- tables


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one wire, over the seeds. ``seconds`` of training until the target accuracy,
    the median; infinite where most runs did not reach it.
    """

    method: str
    wire: str
    seconds: float
    accuracies: tuple[float, ...]
    kilobytes_per_step: float

    @classmethod
    def of(cls, results, target):
        """Of the results of all seeds."""
        first = results[0]
        return cls(
            first["method"],
            wire_of(first),
            statistics.median(seconds_until(result["curve"], target) for result in results),
            tuple(result["accuracy"] for result in results),
            statistics.median(result["bytes_per_step"] for result in results) / 1e3,
        )


def wire_of(result):
    return f"{result['rate']}{', slow rank' if result['straggler'] else ''}"


def seconds_until(curve, target):
    """Training time of the first evaluation with an accuracy of ``target`` or more."""
    return next((seconds for seconds, accuracy in curve if accuracy >= target), float("inf"))


def cells_on_record(record, methods, settings, target):
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
                cells.append(Cell.of(found, target))
    return cells


def bits_per_second(rate):
    """Of a ``rate`` as tc writes it, "1.5gbit"."""
    found = re.fullmatch(r"([\d.]+)([kmgt]?)bit", rate.lower())
    assert found is not None, f"{rate!r} is no rate of a wire, such as 100mbit"
    return float(found[1]) * 1000 ** " kmgt".index(found[2] or " ")


def tables(cells, baseline):
    """Markdown: times to the target of equal ranks, and of those with a slow one."""
    slow = [cell for cell in cells if "slow" in cell.wire]
    equal = [cell for cell in cells if "slow" not in cell.wire]
    return "\n".join(table(half, baseline) for half in (equal, slow) if half)


def table(cells, baseline):
    """Markdown: a row a method; a column a wire, of seconds to the target, and their share of
    ``baseline``'s there.

    Bytes and accuracies are those of all wires and seeds. The last row has the number of seeds.
    """
    by_place = {(cell.method, cell.wire): cell for cell in cells}
    wires = list(dict.fromkeys(cell.wire for cell in cells))
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        row = [cell for cell in cells if cell.method == method]
        found = [100 * accuracy for cell in row for accuracy in cell.accuracies]
        spread = statistics.stdev(found) if len(found) > 1 else 0.0
        sent = span([cell.kilobytes_per_step for cell in row], 1.05)
        times = []
        for wire in wires:
            cell, of = by_place.get((method, wire)), by_place.get((baseline, wire))
            times.append("" if cell is None else time_of(cell, of))
        rows.append([method, sent, f"{statistics.mean(found):.1f} ± {spread:.1f}", *times])
    seeds = [[len(cell.accuracies) for cell in cells if cell.wire == wire] for wire in wires]
    rows.append(["seeds", "", "", *map(span, seeds)])
    return markdown(["method", "kB a step", "test accuracy, %", *wires], rows)


def span(numbers, apart=1.0):
    """The least and the greatest, if that is more than ``apart`` times as much."""
    least, most = min(numbers), max(numbers)
    return f"{least:,.0f} to {most:,.0f}" if most > apart * least else f"{most:,.0f}"


def time_of(cell, baseline):
    if cell.seconds == float("inf"):
        return "not reached"
    reached = baseline is not None and baseline.seconds < float("inf")
    share = f" ({cell.seconds / baseline.seconds:.2f})" if reached else ""
    return f"{cell.seconds:.1f}{share}"


@hydra.main(version_base="1.3", config_path=".", config_name="wires")
def main(config):
    if reason := why_not():
        sys.exit(f"The study needs hosts of its own on this machine: {reason}.")
    folder = Path(HydraConfig.get().runtime.output_dir)
    given = OmegaConf.to_container(config, resolve=True)
    print(f"\n{study(given, folder)}\n{folder}/wires.md; every run is a line of runs.jsonl")


if __name__ == "__main__":
    main()
