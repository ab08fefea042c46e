"""The large-batch study: ``python recipes/large_batch.py --help``."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.optim import Optimizer

# run as a script: make `recipes` importable, instead of this folder's modules at the top level
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.schedules import WarmupLR, linear_scaled_lr, sqrt_scaled_lr, warmup_poly
from recipes.data.scans import Images, augmented_digits
from recipes.models.cnn import small_cnn
from recipes.record import Result, finish

SCALINGS: dict[str, Callable[[float, int, int], float]] = {
    "none": lambda base_lr, batch_size, base_batch_size: base_lr,
    "linear": linear_scaled_lr,
    "sqrt": sqrt_scaled_lr,
}


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train, the same for every batch size.

    ``optimizer`` is a Hydra node that makes a partial of parameters and lr; ``scaling`` says how
    the learning rate grows with batch size / base batch size; ``warmup_epochs`` how long it takes
    to get there.
    """

    label: str
    optimizer: dict[str, Any]
    scaling: str
    warmup_epochs: float
    base_lrs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a study share. ``copies`` are augmented images per scan."""

    epochs: int
    copies: int
    base_batch_size: int
    weight_decay: float
    widths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What sets one run apart. ``part`` is evaluated on: ``val`` to choose ``base_lr``, ``test``
    to report.
    """

    method: Method
    batch_size: int
    base_lr: float
    seed: int
    part: str

    def lr(self, settings: Settings) -> float:
        return SCALINGS[self.method.scaling](
            self.base_lr, self.batch_size, settings.base_batch_size
        )

    def key(self, settings: Settings) -> str:
        """Equal for runs that would do the same, whatever they are called: batch 32 needs no
        scaling, for instance.
        """
        method = [self.method.optimizer, self.method.warmup_epochs, self.lr(settings)]
        text = json.dumps(
            [asdict(settings), method, self.batch_size, self.seed, self.part], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def data(copies: int) -> dict[str, Images]:
    return augmented_digits(copies)


def execute(run: Run, settings: Settings) -> dict[str, Any]:
    """Train and evaluate, on one thread, so that as many runs as cores go on at once. Returns a
    line of the record.
    """
    torch.set_num_threads(1)
    start = time.perf_counter()
    parts = data(settings.copies)
    torch.manual_seed(run.seed)
    network = small_cnn(1, 10, settings.widths).to(memory_format=torch.channels_last)
    steps, loss = fit(network, parts["train"], run, settings)
    return {
        "key": run.key(settings),
        "method": run.method.label,
        "batch_size": run.batch_size,
        "base_lr": run.base_lr,
        "lr": run.lr(settings),
        "seed": run.seed,
        "part": run.part,
        "steps": steps,
        "train_loss": loss if math.isfinite(loss) else None,
        "accuracy": accuracy(network, parts[run.part]) if math.isfinite(loss) else 0.0,
        "seconds": round(time.perf_counter() - start, 2),
    }


def fit(network: nn.Module, train: Images, run: Run, settings: Settings) -> tuple[int, float]:
    """Number of steps of the whole run, and the last epoch's mean loss; stops after an epoch
    without finite loss.
    """
    steps_per_epoch = len(train.labels) // run.batch_size
    groups = exclude_bias_and_norm(network, settings.weight_decay)
    optimizer: Optimizer = instantiate(run.method.optimizer)(groups, lr=run.lr(settings))
    factor = warmup_poly(settings.epochs, run.method.warmup_epochs, steps_per_epoch=steps_per_epoch)
    schedule = WarmupLR(optimizer, factor)
    images = train.images.to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(run.seed)
    network.train()
    mean = math.nan
    for _ in range(settings.epochs):
        losses = torch.zeros(())
        order = torch.randperm(len(images), generator=generator)
        for batch in order[: steps_per_epoch * run.batch_size].view(
            steps_per_epoch, run.batch_size
        ):
            loss = F.cross_entropy(network(images[batch]), train.labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses += loss.detach()
        mean = losses.item() / steps_per_epoch
        if not math.isfinite(mean):
            break
    return steps_per_epoch * settings.epochs, mean


@torch.no_grad()
def accuracy(network: nn.Module, part: Images) -> float:
    network.eval()
    correct = sum(
        int((network(images).argmax(1) == labels).sum())
        for images, labels in zip(part.images.split(1000), part.labels.split(1000), strict=True)
    )
    return correct / len(part.labels)


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
    print(f"\n{table(cells)}\n{folder}/large_batch.md; every run is a line of runs.jsonl")


if __name__ == "__main__":
    main()
