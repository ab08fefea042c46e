"""What mirrors of sharded optimizers cost in an elastic fit without a death.

    python -m benchmarks.elastic.mirrors --ranks 4 --mib 16 --steps 25

Optimizers that are whole on each rank, sharded, and sharded with mirrors, on this host: medians of
a step, bytes that a rank sends a step, the optimizer's state that a rank holds, and its largest
memory. ``--mib`` is the size of the parameters; AdamW's state is twice as much.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.comm.recording import CollectiveRecord

WIDTH = 1024  # of layers of 4 MiB
WARM_UP = 5  # steps
VARIANTS: dict[str, dict[str, Any]] = {
    "ring_elastic": {"elastic": True},
    "ring_sharded": {"shard_optimizer": True},
    "ring_sharded, elastic": {"elastic": True, "shard_optimizer": True},
}


class Module(pl.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(options.mib / 4))))
        )
        self.ends: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-6)


def sent(record: CollectiveRecord, ranks: int) -> float:
    """Bytes that a rank sends on a ring; those of mirrors go to one other rank."""
    share = {"all_reduce": 2 * (ranks - 1) / ranks, "all_to_all": 1.0}
    return record.nbytes * share.get(record.kind, (ranks - 1) / ranks)


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    module, records, state = Module(options), list[CollectiveRecord](), 0
    strategy = RingStrategy(backend=options.backend, monitor=False, **VARIANTS[options.rank])
    strategy.listeners.append(records.append)

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            nonlocal state
            (sliced,) = getattr(strategy.algorithm, "_set", []) or [None]
            held = sliced.held_state() if sliced is not None else trainer.optimizers[0].state
            state = sum(
                v.nbytes
                for values in held.values()
                for v in values.values()
                if isinstance(v, Tensor)
            )

    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_steps=options.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Look()],
    )
    data = TensorDataset(torch.randn(options.steps * options.ranks * 4, WIDTH))
    trainer.fit(module, DataLoader(data, batch_size=4))
    steps = [
        after - before
        for before, after in zip(module.ends[WARM_UP:], module.ends[WARM_UP + 1 :], strict=False)
    ]
    result = {
        "step": statistics.median(steps),
        "sent": sum(sent(record, options.ranks) for record in records) / max(1, len(module.ends)),
        "state": state,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    (Path(options.folder) / f"{os.getpid()}.json").write_text(json.dumps(result))


def run(variant: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the ranks of one job have measured."""
    launch = ["--min-ranks", "1"] if VARIANTS[variant].get("elastic") else []
    with tempfile.TemporaryDirectory() as folder:
        rank = ["--rank", variant, "--folder", folder]
        numbers = [
            "--ranks",
            str(options.ranks),
            "--mib",
            str(options.mib),
            "--steps",
            str(options.steps),
        ]
        job = [
            sys.executable,
            "-m",
            "lightning_ring.cli.ringrun",
            "-n",
            str(options.ranks),
            *launch,
            "--",
        ]
        command = [
            *job,
            sys.executable,
            "-m",
            "benchmarks.elastic.mirrors",
            *numbers,
            "--backend",
            options.backend,
            *rank,
        ]
        done = subprocess.run(
            command,
            timeout=500,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        return [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mib", type=float, default=64.0, help="of parameters")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        train(options)
        return
    for variant in VARIANTS:
        results = run(variant, options)
        median = {
            name: statistics.median(one[name] for one in results)
            for name in ("step", "sent", "state", "memory")
        }
        print(
            f"{variant}: step {1e3 * median['step']:.0f} ms, sent {median['sent'] / 2**20:.1f} MiB "
            f"a step, state {median['state'] / 2**20:.1f} MiB, memory "
            f"{median['memory'] / 2**20:.0f} MiB"
        )


if __name__ == "__main__":
    main()
