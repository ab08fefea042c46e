"""How long all ranks stand still when a process joins, and when a rank dies.

    python -m benchmarks.elastic.join --mib 16 256 1024 --rate 10gbit

Two hosts, network namespaces with a rate-limited link, have one rank each (as root). One rank kills
itself in step 8, and the process that takes its place joins later. Standing still is the time
between two optimizer steps of the other rank, less its median step; beside it stands the time of
the bytes on the wire. ``--mib`` is the whole state: parameters and twice as much of Adam.
``--algorithm sharded`` shards it.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.turns import parser_of
from tests.hosts import INTERFACE, open_hosts, why_not

WIDTH, DEADLY, AFTER = 1024, 8, 4  # of layers of 4 MiB; steps before the death, and after the join
JOB_SECONDS = 400.0


def train(folder, mib, algorithm):
    import lightning.pytorch as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_ring import ElasticStrategy
    from lightning_ring.algorithms.sharded import Sharded

    torch.set_num_threads(1)
    number = os.environ["RING_MEMBER"]
    rows = max(1, round(mib * 2**20 / 3 / 4 / WIDTH))

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            sizes = [min(WIDTH, rows - first) for first in range(0, rows, WIDTH)]
            self.layers = nn.ModuleList(nn.Linear(WIDTH, size, bias=False) for size in sizes)

        def training_step(self, batch, batch_idx):
            if number == "1" and self.global_step == DEADLY:
                os.kill(os.getpid(), signal.SIGKILL)
            return sum(layer(batch[0]).square().mean() for layer in self.layers)  # type: ignore[return-value]

        def on_train_batch_end(self, *_):
            with (folder / f"{number}.steps").open("a") as log:
                entry = [self.global_step, self.trainer.world_size, time.monotonic()]
                log.write(json.dumps(entry) + "\n")
            if (folder / "2.steps").exists():
                lines = (folder / "2.steps").read_text().splitlines()
                # the same on all ranks, a step later
                self.trainer.should_stop = len(lines) > AFTER and self.trainer.world_size > 1

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-6)

    trainer = pl.Trainer(
        strategy=ElasticStrategy(algorithm=Sharded() if algorithm == "sharded" else None),
        accelerator="cpu",
        max_steps=100_000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(200_000, WIDTH)), batch_size=1))


def measure(mib, rate, algorithm):
    """Seconds of a median step of two ranks, and for which the other rank stood still at the
    death, and at the join.
    """
    with open_hosts(2, rate) as hosts, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        listed = ",".join(f"{host}:1" for host in hosts.names)
        ringrun = [sys.executable, "-m", "lightning_ring.cli.ringrun", "-H", listed]
        ringrun += ["--min-ranks", "1", "--respawn", sys.executable, "-m", __spec__.name]
        ringrun += ["--train", str(folder), "--mib", str(mib), "--algorithm", algorithm]
        environ = os.environ | {"RING_SSH": str(hosts.ssh), "GLOO_SOCKET_IFNAME": INTERFACE}
        command, said = hosts.on(hosts.names[0], *ringrun), {"capture_output": True, "text": True}
        done = subprocess.run(command, env=environ, timeout=JOB_SECONDS, **said)
        steps = [json.loads(line) for line in (folder / "0.steps").read_text().splitlines()]
        if steps[-1][1] != 2 or steps[DEADLY][1] != 1:
            raise SystemExit(f"nobody joined:\n{done.stdout}\n{done.stderr}")
    gaps = [(a[1], b[1], b[2] - a[2]) for a, b in pairwise(steps)]
    of_two = statistics.median(gap for before, after, gap in gaps[2:] if before == after == 2)
    of_one = statistics.median(gap for before, after, gap in gaps if before == after == 1)
    (death,) = (gap for before, after, gap in gaps if (before, after) == (2, 1))
    (join,) = (gap for before, after, gap in gaps if (before, after) == (1, 2))
    return of_two, death - of_one, join - of_two


def main():
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=float, nargs="+", default=[16.0, 256.0, 1024.0])
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--jobs", type=int, default=3, help="of each")
    parser.add_argument("--algorithm", choices=("averaging", "sharded"), default="averaging")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train is not None:
        train(asked.train, asked.mib[0], asked.algorithm)
        return
    if reason := why_not():
        raise SystemExit(f"no hosts: {reason}")
    print("| state | a step | still at a death | still at a join | bytes on the wire |")
    print("|---|---|---|---|---|")
    gigabits = float(asked.rate.removesuffix("gbit"))
    for mib in asked.mib:
        found = [measure(mib, asked.rate, asked.algorithm) for _ in range(asked.jobs)]
        step, death, join = (statistics.median(times) for times in zip(*found, strict=True))
        wire = mib * 2**20 * 8 / (gigabits * 1e9)
        print(f"| {mib:g} MiB | {step:.2f} s | {death:.2f} s | {join:.2f} s | {wire:.2f} s |")


if __name__ == "__main__":
    main()
