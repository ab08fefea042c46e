"""One run of the large-batch study: a batch size, an optimizer, a learning rate, a seed."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn
from torch.optim import Optimizer

from lightning_ring.optim import exclude_bias_and_norm
from lightning_ring.schedules import WarmupLR, linear_scaled_lr, sqrt_scaled_lr, warmup_poly
from recipes.models.cnn import small_cnn
from recipes.study.augment import Images, augmented_digits

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
