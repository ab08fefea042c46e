"""What each rank of a run of the study of wires does: ``python -m benchmarks.wires.rank
ORDER.json`` under mpirun.
"""

import copy
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_ring import distribute
from lightning_ring.schedules import warmup_cosine
from recipes.data.digits import Images, augment, load_digits
from recipes.data.tensors import stratified_split
from recipes.large_batch import accuracy
from tests.hosts import INTERFACE

WARM_UP, TIMED = 6, 20  # batches
TOLD_SECONDS = 0.02


def pairs_of_digits(count):
    """``train`` of ``count`` images ``[1, 8, 16]``, ``val`` of an eighth of that, ``test`` of a
    quarter.

    Each is a pair of scans, augmented once each. Scans never cross the split. The same on every
    call.
    """
    images, labels = load_digits()
    train, test = stratified_split(labels, 0.25, seed=0)
    rest, val = stratified_split(labels[train], 0.25, seed=0)
    generator = torch.Generator().manual_seed(0)

    def pairs(part, size):
        left, right = part[torch.randint(len(part), (2, size), generator=generator)]
        both = torch.cat([augment(images[left], generator), augment(images[right], generator)], 3)
        return Images(both, 10 * labels[left] + labels[right])

    return {
        "train": pairs(train[rest], count),
        "val": pairs(train[val], count // 8),
        "test": pairs(test, count // 4),
    }


def network(hidden):
    """Images ``[batch, 1, 8, 16]`` to logits. Most of its bytes are in one matrix, as in many
    recognisers.
    """
    convolution = nn.Conv2d(1, 32, kernel_size=3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    first = nn.Flatten(), nn.Linear(32 * 32, hidden), nn.LayerNorm(hidden), nn.ReLU()
    second = nn.Linear(hidden, hidden), nn.LayerNorm(hidden), nn.ReLU()
    return nn.Sequential(*convolution, *first, *second, nn.Linear(hidden, 100))


def batches(train, batch_size, rank, num_ranks, seed):
    """This rank's batches, endlessly: an epoch is one order of all images, of which each rank
    takes its part.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(train.labels), generator=generator)[rank::num_ranks]
        for batch in order.split(batch_size):
            if len(batch) == batch_size:
                yield train.images[batch], train.labels[batch]


def sent_bytes():
    """That this host has sent, headers of TCP included."""
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


@dataclass
class Replicas:
    """``called`` in the place of the model. Before an evaluation ``show`` has parameters be what
    the ranks stand for.

    ``barrier``, ``show`` and ``close`` are collective.
    """

    called: nn.Module
    rank: int
    show: Callable[[], object]
    barrier: Callable[[], object]
    close: Callable[[], object]


def kept_together(module, optimizer, order):
    """``module`` on this rank, which the order's method keeps equal to the others'."""
    if order["method"]["distribute"] is None:
        rank, store = int(os.environ["OMPI_COMM_WORLD_RANK"]), f"tcp://{order['address']}:29511"
        num_ranks = order["settings"]["ranks"]
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
        called = DistributedDataParallel(module)
        return Replicas(called, rank, lambda: None, dist.barrier, dist.destroy_process_group)
    arguments = {
        name: instantiate(value) if isinstance(value, dict) else value
        for name, value in order["method"]["distribute"].items()
    }
    training = distribute(module, optimizer, **arguments)
    assert training.communicator is not None
    barrier = training.communicator.barrier
    return Replicas(module, training.rank, training.show_averages, barrier, training.close)


class StepsOfAll:
    """How many steps the ranks have taken together, where each goes at its own pace.

    A thread tells and asks a store, however long a step takes: no rank begins one where the others
    have taken enough. Its messages cross the wire that is measured, and no batch waits behind what
    else is on that.
    """

    def __init__(self, store):
        self.taken = 0  # by this rank
        self._store = store
        self._of_others = 0
        self._closed = threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._tell, daemon=True)
        self._thread.start()

    def one_more(self):
        self.taken += 1
        if self._error is not None:
            raise self._error
        return self.taken + self._of_others

    def close(self):
        self._closed.set()
        self._thread.join(60)

    def _tell(self):
        told = 0
        try:
            while not self._closed.wait(TOLD_SECONDS):
                taken = self.taken
                self._of_others = int(self._store.add("steps of the study", taken - told)) - taken
                told = taken
        except Exception as error:
            self._error = error


def train(order):
    """Accuracy on validation images over training time, and on test images at the end; bytes
    that rank 0 sent.
    """
    settings, method = order["settings"], order["method"]
    num_ranks, batch_size, num_steps = (settings[name] for name in ("ranks", "batch_size", "steps"))
    torch.set_num_threads(1)
    parts = pairs_of_digits(settings["images"])
    torch.manual_seed(order["seed"])
    module = network(settings["hidden"])
    optimizer = torch.optim.SGD(
        module.parameters(),
        settings["lr"],
        method["momentum"],
        weight_decay=settings["weight_decay"] * method["weight_decay_factor"],
    )
    factor = warmup_cosine(num_steps, settings["warmup_steps"])
    peak = settings["lr"] * method["lr_factor"]
    slower = seconds_alone(module, batches(parts["train"], batch_size, 0, num_ranks, 0))
    replicas = kept_together(module, optimizer, order)
    is_slow = order["straggler"] and replicas.rank == num_ranks - 1
    data = batches(parts["train"], batch_size, replicas.rank, num_ranks, order["seed"])
    store = dist.distributed_c10d._get_default_store
    together = StepsOfAll(store()) if method["own_pace"] else None
    curve = []
    spent, sent, step, end = 0.0, 0, 0, 0
    while end < num_steps and spent < settings["seconds"]:
        replicas.barrier()
        began, before = time.perf_counter(), sent_bytes()
        end += settings["eval_every"]
        while step < end:
            images, labels = next(data)
            if is_slow:
                time.sleep(slower)
            for group in optimizer.param_groups:
                group["lr"] = peak * factor(min(step, num_steps - 1))
            F.cross_entropy(replicas.called(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            step = step + 1 if together is None else together.one_more() // num_ranks
        took = torch.tensor([time.perf_counter() - began])  # a barrier takes milliseconds more
        # until the last rank was here; all go on from the same number
        dist.all_reduce(took, dist.ReduceOp.MAX)
        spent, sent = spent + took.item(), sent + sent_bytes() - before
        replicas.show()
        curve.append((round(spent, 3), accuracy(module, parts["val"])))
    steps = float(end)
    # those that ranks began before they knew that enough were taken count too
    if together is not None:
        taken = torch.tensor([float(together.taken)])
        dist.all_reduce(taken)
        steps = taken.item() / num_ranks
    result = {"steps": steps, "bytes_per_step": sent / steps, "curve": curve}
    result["accuracy"] = accuracy(module, parts["test"])
    if together is not None:
        together.close()
    replicas.close()
    return result if replicas.rank == 0 else {}


def seconds_alone(module, data):
    """Of a batch on one rank, without communication."""
    module = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    times = []
    for _ in range(WARM_UP + TIMED):
        began = time.perf_counter()
        images, labels = next(data)
        F.cross_entropy(module(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM_UP:])


def main():
    order = json.loads(Path(sys.argv[1]).read_text())
    if result := train(order):
        Path(order["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
