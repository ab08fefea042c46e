"""What an elastic fit costs without a death, and how long it takes to train again after one.

    python -m benchmarks.elastic.recovery --ranks 4 --mib 256 --jobs 5

Each job kills ranks until one is left, over shared memory on this host. Times are of the surviving
ranks, in milliseconds: from the steward's word of a death to the end of the reconnection, and to
the end of the step that is done again; the parts of a step that only an elastic fit has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.integrations.lightning.elastic import step as elastic_step
from tests.chaos.job import Job
from tests.chaos.plan import Plan

STEPS = 6  # between two deaths
WIDTH = 1024  # of layers of 4 MiB


class Module(pl.LightningModule):
    def __init__(self, mib: float, deaths: dict[int, int]) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(mib / 4))))
        )
        self.deaths = deaths  # step, process

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        if self.deaths.get(self.global_step) == int(os.environ["RING_MEMBER"]):
            os.kill(os.getpid(), 9)
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"{self.global_step} steps", flush=True)  # however slow it is, it comes further

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-6)


class Times:
    """Durations of this rank by name, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.noticed: float | None = None

    def add(self, name: str, began: float) -> None:
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)

    def measure(self, owner: Any, function: str, name: str) -> None:
        original = getattr(owner, function)

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = original(*args, **kwargs)
            self.add(name, began)
            return result

        setattr(owner, function, measured)

    def follow_deaths(self) -> None:
        end_waits, go_on, committed = Generations._end_waits, Recovery._go_on, Recovery.committed

        def told(generations: Generations, error: Any) -> None:
            self.noticed = time.perf_counter()
            end_waits(generations, error)

        def reconnected(recovery: Recovery, error: Any) -> None:
            go_on(recovery, error)
            if self.noticed is not None:
                self.add("reconnected after", self.noticed)

        def stepped(recovery: Recovery) -> None:
            committed(recovery)
            if self.noticed is not None:
                self.add("stepped after", self.noticed)
                self.noticed = None

        Generations._end_waits, Recovery._go_on = told, reconnected  # type: ignore[method-assign]
        Recovery.committed = stepped  # type: ignore[method-assign]


def train(folder: Path, number: int, mib: float, deaths: dict[int, int]) -> None:
    torch.set_num_threads(1)
    times = Times()
    times.measure(Recovery, "agree", "commit barrier")
    times.measure(elastic_step, "remember_step", "remembering")
    times.measure(elastic_step, "remember_progress", "remembering progress")
    times.measure(elastic_step.ElasticStep, "take", "step")
    times.follow_deaths()
    steps = STEPS * (len(deaths) + 1)
    trainer = pl.Trainer(
        strategy=RingStrategy(elastic=True),
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(steps * 4 * 8, WIDTH))
    trainer.fit(Module(mib, deaths), DataLoader(data, batch_size=8))
    (folder / f"{number}.json").write_text(json.dumps(times.seconds))


def run_job(ranks: int, mib: float, deaths: dict[int, int]) -> list[dict[str, list[float]]]:
    """The times of the ranks that are left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(Plan(0, ranks), folder, lambda number: train(folder, number, mib, deaths))
        job.run()
        if job.wrong or job.code:
            raise SystemExit(f"a job ended with code {job.code}: {job.wrong}")
        return [json.loads(path.read_text()) for path in folder.glob("*.json")]


def summary(results: list[dict[str, list[float]]]) -> dict[str, Any]:
    names = sorted({name for result in results for name in result})
    shown: dict[str, Any] = {}
    for name in names:
        found = sorted(1e3 * seconds for result in results for seconds in result.get(name, []))
        last = found[min(len(found) - 1, int(0.95 * len(found)))]
        shown[name] = {
            "median": round(statistics.median(found), 2),
            "p95": round(last, 2),
            "count": len(found),
        }
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, default=256.0, help="of gradients")
    parser.add_argument("--jobs", type=int, default=3)
    options = parser.parse_args()
    results: list[dict[str, list[float]]] = []
    for _ in range(options.jobs):
        deaths = {
            STEPS * (index + 1): options.ranks - 1 - index for index in range(options.ranks - 1)
        }
        results += run_job(options.ranks, options.mib, deaths)
    print(json.dumps(summary(results), indent=2))


if __name__ == "__main__":
    main()
