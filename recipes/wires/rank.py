"""What each rank of a run of the study of wires does: ``python -m recipes.wires.rank ORDER.json`` under mpirun."""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.hosts import INTERFACE
from lightning_ring import distribute
from lightning_ring.schedules import WarmupLR, warmup_cosine
from recipes.study.augment import Images, augmented_digits
from recipes.wires.run import Settings


def network(hidden: int) -> nn.Module:
    """Images ``[batch, 1, 8, 8]`` to logits. Most of its bytes are in one matrix, as in many recognisers."""
    return nn.Sequential(
        nn.Conv2d(1, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def batches(train: Images, settings: Settings, rank: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches, endlessly: an epoch is one order of all images, of which each rank takes its part."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(train.labels), generator=generator)[rank :: settings.ranks]
        for batch in order.split(settings.batch_size):
            if len(batch) == settings.batch_size:
                yield train.images[batch], train.labels[batch]


def seconds_of_a_batch(module: nn.Module, settings: Settings, train: Images) -> float:
    """How long this rank computes for one batch, by itself."""
    module, times = copy.deepcopy(module), []
    for _, (images, labels) in zip(range(12), batches(train, settings, 0, 0), strict=False):
        began = time.perf_counter()
        F.cross_entropy(module(images), labels).backward()
        times.append(time.perf_counter() - began)
    return statistics.median(times[4:])


@torch.no_grad()
def accuracy(module: nn.Module, part: Images) -> float:
    correct = sum(
        int((module(images).argmax(1) == labels).sum())
        for images, labels in zip(part.images.split(1000), part.labels.split(1000), strict=True)
    )
    return correct / len(part.labels)


def sent_bytes() -> int:
    """All that this host has sent."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def own_steps(done: int, settings: Settings, *, asynchronous: bool) -> Iterator[int]:
    """This rank's steps until the next evaluation, after ``done`` steps: the number of each, from 0, for its schedule.

    Ranks of an asynchronous method share out what all of them have to do: a fast one takes more steps than a slow one.
    """
    if not asynchronous:
        yield from range(done, done + settings.eval_every)
        return
    store = dist.distributed_c10d._get_default_store()
    while (number := store.add(f"study/{done}", 1) - 1) < settings.eval_every * settings.ranks:
        yield done + number // settings.ranks


@dataclass
class Replicas:
    """``called`` in the place of the model. Before an evaluation ``show`` has parameters be what the ranks stand for.

    ``barrier``, ``show`` and ``close`` are collective.
    """

    called: nn.Module
    rank: int
    show: Callable[[], object]
    barrier: Callable[[], object]
    close: Callable[[], object]


def kept_together(module: nn.Module, optimizer: torch.optim.Optimizer, order: dict[str, Any]) -> Replicas:
    """``module`` on this rank, which the order's method keeps equal to the others'."""
    if order["method"]["distribute"] is None:
        rank, store = int(os.environ["OMPI_COMM_WORLD_RANK"]), f"tcp://{order['address']}:29511"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=order["settings"]["ranks"])
        return Replicas(DistributedDataParallel(module), rank, lambda: None, dist.barrier, dist.destroy_process_group)
    arguments = {
        name: instantiate(value) if isinstance(value, dict) else value
        for name, value in order["method"]["distribute"].items()
    }
    training = distribute(module, optimizer, **arguments)
    assert training.communicator is not None
    return Replicas(module, training.rank, training.show_averages, training.communicator.barrier, training.close)


def train(order: dict[str, Any]) -> dict[str, Any]:
    """Accuracy on validation images over training time, and on test images at the end; bytes that rank 0 sent."""
    settings = Settings(**order["settings"])
    torch.set_num_threads(1)
    parts = augmented_digits(settings.copies)
    torch.manual_seed(order["seed"])
    module = network(settings.hidden)
    optimizer = torch.optim.SGD(
        module.parameters(),
        settings.lr * order["method"]["lr_scale"],
        order["method"]["momentum"],
        weight_decay=settings.weight_decay,
    )
    schedule = WarmupLR(optimizer, warmup_cosine(settings.steps, settings.warmup_steps))
    slower = seconds_of_a_batch(module, settings, parts["train"])
    replicas = kept_together(module, optimizer, order)
    is_slow = order["straggler"] and replicas.rank == settings.ranks - 1
    data = batches(parts["train"], settings, replicas.rank, order["seed"])
    curve: list[tuple[float, float]] = []
    spent, sent, step = 0.0, 0, 0
    while step < settings.steps and spent < settings.seconds:
        replicas.barrier()
        began, before = time.perf_counter(), sent_bytes()
        for number in own_steps(step, settings, asynchronous=order["method"]["asynchronous"]):
            while schedule.last_epoch < number:
                schedule.step()
            images, labels = next(data)
            if is_slow:
                time.sleep(slower)
            F.cross_entropy(replicas.called(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        replicas.barrier()
        ended = torch.tensor([time.perf_counter() - began])
        dist.broadcast(ended, 0)  # all ranks end at the same step
        spent, sent, step = spent + ended.item(), sent + sent_bytes() - before, step + settings.eval_every
        replicas.show()
        curve.append((round(spent, 3), accuracy(module, parts["val"])))
    result = {"steps": step, "batch_seconds": slower, "bytes_per_step": sent / step, "curve": curve}
    result["accuracy"] = accuracy(module, parts["test"])
    replicas.close()
    return result if replicas.rank == 0 else {}


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    if result := train(order):
        Path(order["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
