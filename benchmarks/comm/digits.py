"""Test accuracy of the recipe of the digits under each compressor, and where ranks step alone.

    ringrun -n 2 python -m benchmarks.comm.digits --seeds 1 2 3

All runs of ``recipes/train.py experiment=digits`` one after another, in one job: the same 20 epochs
of 20 steps, the last weights. Beside each is what it changes of the recipe.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.comm.digits_recipe import digits
from lightning_ring import RingStrategy
from lightning_ring.algorithms.local import DiLoCo, LocalSGD
from lightning_ring.gradients.compression import DGC, OneBit, PowerSGD, TopK

WAYS: dict[str, tuple[Callable[[], RingStrategy], tuple[str, ...]]] = {
    "none": (RingStrategy, ()),
    "bf16": (lambda: RingStrategy(compression="bf16"), ()),
    "int8": (lambda: RingStrategy(compression="int8"), ()),
    "onebit": (lambda: RingStrategy(compression=OneBit()), ()),
    "terngrad": (lambda: RingStrategy(compression="terngrad"), ()),
    "topk": (lambda: RingStrategy(compression=TopK()), ()),
    "dgc, warm-up of 80 steps": (
        lambda: RingStrategy(compression=DGC(warmup_steps=80)),
        ("optimizer.momentum=0", "optimizer.nesterov=false"),
    ),
    "powersgd from step 40 on": (lambda: RingStrategy(compression=PowerSGD(start_iter=40)), ()),
    "LocalSGD(8)": (lambda: RingStrategy(algorithm=LocalSGD(8)), ()),
    "LocalSGD(8, warmup_steps=100)": (
        lambda: RingStrategy(algorithm=LocalSGD(8, warmup_steps=100)),
        (),
    ),
    "DiLoCo(20)": (lambda: RingStrategy(algorithm=DiLoCo(20)), ()),
}


def accuracy(make: Callable[[], RingStrategy], overrides: tuple[str, ...], seed: int) -> float:
    trainer, model, data = digits(make(), seed, overrides)
    trainer.fit(model, data)
    return float(trainer.test(model, data, verbose=False)[0]["test/accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_ring", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for way in asked.ways:
        began = time.perf_counter()
        found = [partial(accuracy, *WAYS[way])(seed) for seed in asked.seeds]
        rank_zero = torch.distributed.is_initialized() is False or torch.distributed.get_rank() == 0
        if rank_zero:
            each = ", ".join(f"{value:.4f}" for value in found)
            seconds = time.perf_counter() - began
            print(f"{way:32}{statistics.mean(found):8.4f}   ({each})   {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
