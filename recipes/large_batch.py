"""The large-batch study: ``python recipes/large_batch.py --help``."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
from recipes.data.digits import Images, augmented_digits
from recipes.models import small_cnn
from recipes.record import Result, finish, key_of, markdown

SCALINGS: dict[str, Callable[[float, int, int], float]] = {
    "none": lambda base_lr, batch_size, base_batch_size: base_lr,
    "linear": linear_scaled_lr,
    "sqrt": sqrt_scaled_lr,
}
data = cache(augmented_digits)
Node = dict[str, Any]  # of configs/large_batch.yaml


@dataclass(frozen=True, slots=True)
class Run:
    """A run; ``part`` is evaluated on: ``val`` to choose ``base_lr``, ``test`` to report."""

    method: Node
    batch_size: int
    base_lr: float
    seed: int
    part: str

    def lr(self, settings: Node) -> float:
        scaled = SCALINGS[self.method["scaling"]]
        return scaled(self.base_lr, self.batch_size, settings["base_batch_size"])

    def key(self, settings: Node) -> str:
        """Equal for runs that would do the same, whatever they are called."""
        method = [self.method["optimizer"], self.method["warmup_epochs"], self.lr(settings)]
        return key_of(settings, method, self.batch_size, self.seed, self.part)


def execute(run: Run, settings: Node) -> Result:
    """Train and evaluate, on one thread; returns a line of the record."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    parts = data(settings["copies"])
    torch.manual_seed(run.seed)
    network = small_cnn(1, 10, settings["widths"]).to(memory_format=torch.channels_last)
    steps, loss = fit(network, parts["train"], run, settings)
    return {
        "key": run.key(settings),
        "method": run.method["label"],
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


def fit(network: nn.Module, train: Images, run: Run, settings: Node) -> tuple[int, float]:
    """Steps of the run, and the last epoch's mean loss; stops where that is not finite."""
    epochs, warmup = settings["epochs"], run.method["warmup_epochs"]
    steps_per_epoch = len(train.labels) // run.batch_size
    groups = exclude_bias_and_norm(network, settings["weight_decay"])
    optimizer: Optimizer = instantiate(run.method["optimizer"])(groups, lr=run.lr(settings))
    schedule = WarmupLR(optimizer, warmup_poly(epochs, warmup, steps_per_epoch=steps_per_epoch))
    images = train.images.to(memory_format=torch.channels_last)
    generator = torch.Generator().manual_seed(run.seed)
    network.train()
    mean = math.nan
    for _ in range(epochs):
        losses = torch.zeros(())
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(run.batch_size)[:steps_per_epoch]:
            loss = F.cross_entropy(network(images[batch]), train.labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses += loss.detach()
        mean = losses.item() / steps_per_epoch
        if not math.isfinite(mean):
            break
    return steps_per_epoch * epochs, mean


@torch.no_grad()
def accuracy(network: nn.Module, part: Images) -> float:
    network.eval()
    batches = zip(part.images.split(1000), part.labels.split(1000), strict=True)
    right = sum(int((network(images).argmax(1) == labels).sum()) for images, labels in batches)
    return right / len(part.labels)


def study(config: Node, folder: Path) -> str:
    """Choose each method's learning rate at each batch size on the validation images, train every
    seed with it, test, write the report. Returns the table.
    """
    settings = config["settings"]

    def finished(groups: list[list[Run]]) -> list[list[Result]]:
        # small batches take longest
        runs = sorted((run for group in groups for run in group), key=lambda run: run.batch_size)
        by_key = {run.key(settings): run for run in runs}
        work = partial(execute, settings=settings)
        results = finish(by_key, work, line, folder / "runs.jsonl", config["workers"])
        return [[results[run.key(settings)] for run in group] for group in groups]

    tuning = [
        [Run(method, size, lr, config["tuning_seed"], "val") for lr in method["base_lrs"]]
        for method in config["methods"].values()
        for size in config["batch_sizes"]
    ]
    chosen = [best(*pair) for pair in zip(tuning, finished(tuning), strict=True)]
    tests = [[replace(run, seed=seed, part="test") for seed in config["seeds"]] for run in chosen]
    found = table(chosen, finished(tests))
    (folder / "large_batch.md").write_text(found)
    return found


def line(result: Result) -> str:
    about = [result[name] for name in ("part", "method", "batch_size", "lr", "seed")]
    said = "{}: {}, batch {}, lr {:.4g}, seed {}".format(*about)
    took = f"{result['steps']} steps, {result['seconds']} s"
    return f"{said}: accuracy {result['accuracy']:.4f} ({took})"


def best(runs: Iterable[Run], results: Iterable[Result]) -> Run:
    """The run of highest validation accuracy; of equals, the one of lower training loss."""

    def merit(pair: tuple[Run, Result]) -> tuple[float, float]:
        loss = pair[1]["train_loss"]
        return pair[1]["accuracy"], -math.inf if loss is None else -loss

    return max(zip(runs, results, strict=True), key=merit)[0]


def table(chosen: Sequence[Run], tests: Sequence[Sequence[Result]]) -> str:
    """Markdown: a row a method, a column a batch size; over the seeds mean ± standard deviation in
    per cent, and the learning rate.
    """
    columns: dict[str, None] = {}
    rows: dict[str, list[str]] = {}
    for run, results in zip(chosen, tests, strict=True):
        columns[f"batch {run.batch_size}, {results[0]['steps']:,} steps"] = None
        per_cent = [100 * result["accuracy"] for result in results]
        spread = statistics.stdev(per_cent) if len(per_cent) > 1 else 0.0
        rates = sorted(run.method["base_lrs"])
        edge = "*" if run.base_lr in (rates[0], rates[-1]) else ""
        cell = f"{statistics.mean(per_cent):.2f} ± {spread:.2f} ({results[0]['lr']:.3g}{edge})"
        rows.setdefault(run.method["label"], []).append(cell)
    return markdown(["method", *columns], [[method, *row] for method, row in rows.items()])


@hydra.main(version_base="1.3", config_path="../configs", config_name="large_batch")
def main(config: DictConfig) -> None:
    folder = Path(HydraConfig.get().runtime.output_dir)
    container: Any = OmegaConf.to_container(config, resolve=True)
    found = study(container, folder)
    print(f"\n{found}\n{folder}/large_batch.md; every run is a line of runs.jsonl")


if __name__ == "__main__":
    main()
