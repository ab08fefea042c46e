"""Test accuracy of the recipe of the digits after 20 deaths, beside undisturbed runs with the same
seeds.

    python -m benchmarks.elastic.digits_deaths --seeds 1 2 3

All runs train ``recipes/train.py experiment=digits`` on 4 ranks with ``elastic=True``; the last
weights are tested. In the second run of each seed a rank is killed every 18 steps, rank 0 as often
as others, and replaced (by a process that has torch imported already). Each step then waits a
little, so that replacements come in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch

from benchmarks.comm.digits_recipe import digits
from lightning_ring import RingStrategy
from tests.chaos.job import Job
from tests.chaos.plan import Plan

RANKS, FIRST, EVERY = 4, 10, 18  # the first death is in that step
PACE = 0.15  # seconds of a step of a run with deaths


class Deaths(L.Callback):
    """``ranks``: which rank is killed in which step, once."""

    def __init__(self, ranks: Mapping[int, int], folder: Path) -> None:
        self._ranks, self._folder = ranks, folder

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        step = trainer.global_step
        if self._ranks:
            time.sleep(PACE)
        if step not in self._ranks or self._ranks[step] % trainer.world_size != trainer.global_rank:
            return
        try:
            (self._folder / f"{step}.death").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        print(f"{trainer.global_step} steps", flush=True)  # so that the job does not seem to hang


def train(folder: Path, seed: int, deaths: Mapping[int, int]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer, model, data = digits(
        RingStrategy(elastic=True), seed, callbacks=[Deaths(deaths, folder)]
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        images, labels = data.datasets["test"].tensors
        with torch.no_grad():
            correct = (model.eval()(images).argmax(1) == labels).double().mean().item()
        changes = trainer.strategy.rank_changes
        result = [correct, trainer.global_step, changes.deaths, changes.joins]
        (folder / "result").write_text(json.dumps(result))


def run(seed: int, num_deaths: int) -> list[float]:
    """Accuracy, steps, deaths and joins."""
    draws = random.Random(seed)
    deaths = {FIRST + EVERY * number: draws.randrange(RANKS) for number in range(num_deaths)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(
            Plan(seed, RANKS, respawns=num_deaths),
            folder,
            lambda number: train(folder, seed, deaths),
        )
        job.run()
        if job.wrong or job.code:
            raise SystemExit(
                f"a job ended with code {job.code}: "
                f"{job.wrong}\n{(folder / 'launcher.out').read_text()}"
            )
        found: list[float] = json.loads((folder / "result").read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--deaths", type=int, default=20)
    asked = parser.parse_args()
    columns: dict[int, list[float]] = {0: [], asked.deaths: []}
    for seed in asked.seeds:
        for num_deaths, column in columns.items():
            accuracy, steps, deaths, joins = run(seed, num_deaths)
            column.append(accuracy)
            changes = f"{steps:.0f} steps, {deaths:.0f} deaths, {joins:.0f} joins"
            print(f"seed {seed}: {accuracy:.4f} after {changes}", flush=True)
    for num_deaths, column in columns.items():
        print(
            f"{num_deaths:3} deaths: mean {statistics.mean(column):.4f}, {min(column):.4f} to "
            f"{max(column):.4f}"
        )


if __name__ == "__main__":
    main()
