"""Useful steps of a fit in which a rank is killed every 15 s and replaced, beside an undisturbed
one.

    python -m benchmarks.elastic.respawn --ranks 4 --jobs 2

Jobs of ``ringrun --respawn`` train layers with SGD on this host, by turns without and with kills.
Counted are, over the same number of seconds: optimizer steps, each once however often it was begun,
and the samples of all ranks in them. A replacement starts a Python and imports torch, on the cores
on which the others train. ``--pace`` seconds of each forward are sleep, as a host sleeps while its
GPU computes.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.elastic.outlive import ROOT, Job, finished_steps
from benchmarks.elastic.outlive_rank import BATCH, WIDTH, Watch, layers, loss_of

WARM = 20  # steps before the count
START_SECONDS = 120.0


def train(asked: argparse.Namespace) -> None:
    """A rank."""
    import lightning.pytorch as pl
    import torch
    from torch import Tensor
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ring import RingStrategy

    torch.set_num_threads(1)
    watch = Watch(asked.folder)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = layers(asked.mib)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            time.sleep(asked.pace)
            return loss_of(self.net, batch[0])

        def on_train_batch_end(self, *_: Any) -> None:
            watch.finished(self.global_step)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    trainer = pl.Trainer(
        strategy=RingStrategy(elastic=True),
        accelerator="cpu",
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Module(), DataLoader(TensorDataset(torch.randn(1000 * BATCH, WIDTH)), batch_size=BATCH)
    )


def count(asked: argparse.Namespace, draws: random.Random | None) -> tuple[int, int, int]:
    """Steps, samples and kills of one job."""
    with tempfile.TemporaryDirectory() as name, Job(Path(name)) as job:
        folder, words = Path(name), ["--mib", str(asked.mib), "--pace", str(asked.pace)]
        ringrun = [
            "-n",
            str(asked.ranks),
            "--min-ranks",
            "1",
            "--respawn",
            "--respawn-limit",
            "1000",
        ]
        rank = [sys.executable, "-m", "benchmarks.elastic.respawn", "--folder", name, *words]
        job.serve(sys.executable, "-m", "lightning_ring.cli.ringrun", *ringrun, *rank)
        until = time.monotonic() + START_SECONDS
        while (
            len([last for last in finished_steps(folder).values() if last[-1][0] >= WARM])
            < asked.ranks
        ):
            if time.monotonic() > until:
                raise SystemExit((folder / "0.log").read_text()[-3000:])
            time.sleep(0.05)
        began = time.monotonic()
        kills = 0
        while (now := time.monotonic()) < began + asked.seconds:
            if draws is not None and now > began + (kills + 1) * asked.every:
                alive = [
                    pid
                    for pid, steps in finished_steps(folder).items()
                    if steps[-1][1] > now - 2 and is_alive(pid)
                ]
                os.kill(draws.choice(sorted(alive)), signal.SIGKILL)
                kills += 1
            time.sleep(0.02)
        counted = [
            step
            for steps in finished_steps(folder).values()
            for step, when in steps
            if began < when <= now
        ]
    return len(set(counted)), len(counted) * BATCH, kills


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.elastic.respawn",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, default=16.0, help="of gradients")
    parser.add_argument(
        "--pace", type=float, default=0.1, help="seconds of a forward in which the host sleeps"
    )
    parser.add_argument("--seconds", type=float, default=95.0, help="that are counted, of each job")
    parser.add_argument("--every", type=float, default=15.0, help="seconds between kills")
    parser.add_argument("--jobs", type=int, default=2, help="without kills, and as many with them")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the choice of ranks that are killed"
    )
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.folder is not None:
        train(asked)
        return
    # so that no job is left behind
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    )
    draws = random.Random(asked.seed)
    loads = [os.getloadavg()[0]]
    shares = []
    for number in range(asked.jobs):
        calm, kills = count(asked, None), count(asked, draws)
        shares.append([after / before for before, after in zip(calm[:2], kills[:2], strict=True)])
        print(
            f"job {number}: {calm[0]} steps, {kills[0]} with {kills[2]} kills: {shares[-1][0]:.3f}",
            flush=True,
        )
    loads.append(os.getloadavg()[0])
    steps, samples = (statistics.median(column) for column in zip(*shares, strict=True))
    print(
        f"useful steps {steps:.3f} of those of an undisturbed fit, samples {samples:.3f} (medians)"
    )
    said = f"load average {loads[0]:.1f} at the beginning, {loads[1]:.1f} at the end"
    print(f"{asked.ranks} ranks, {asked.mib:g} MiB, a forward of {asked.pace:g} s; {said}")


if __name__ == "__main__":
    main()
