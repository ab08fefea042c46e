"""How long the others stand still when a process joins a fit, whose state crosses a network.

    python -m benchmarks.elastic.join --mib 1008 --rate 10gbit  # as root, for hosts
    python -m benchmarks.elastic.join --mib 1008 --rate 10gbit --waiting  # all wait for the state
    python -m benchmarks.elastic.join --mib 1008 --strategy ring_sharded

Two hosts (`benchmarks/hosts.py`) with a rank each. The second rank is killed, and another process
joins in its place. ``--mib`` is the size of parameters and Adam's state. ``--compute`` seconds of a
step are slept, as if an accelerator computed. Times are the first rank's, in milliseconds: ends of
a step to ends of the next, without the step of the death.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.hosts import Hosts, open_hosts
from lightning_ring import RingStrategy
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.integrations.lightning.elastic.catching_up import CatchingUp
from tests.chaos.host import enter
from tests.chaos.job import Job
from tests.chaos.plan import Plan

WIDTH = 1024  # of layers of 4 MiB
DEATH, BEHIND = 3, 8  # a step; steps that are taken together afterwards


class Module(pl.LightningModule):
    def __init__(self, options: argparse.Namespace, folder: Path, number: int) -> None:
        super().__init__()
        layers = max(1, round(options.mib / 3 / 4))
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
        self.options, self.folder, self.number = options, folder, number
        self.ends: list[tuple[float, int]] = []  # of steps, and the number of ranks
        self.together = 0  # steps, since a process has joined

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.number == 1 and self.global_step == DEATH:
            os.kill(os.getpid(), 9)
        time.sleep(self.options.compute)
        return self.net(batch[0]).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        print(f"{self.global_step} steps", flush=True)  # however slow it is, it comes further
        self.ends.append((time.monotonic(), self.trainer.world_size))
        joined = self.number > 1 or (self.global_step > DEATH and self.trainer.world_size > 1)
        self.together += joined
        if self.together == BEHIND:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-6)


def train(folder: Path, number: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    stood_still: list[float] = []
    pause = Recovery.pause

    def timed(recovery: Recovery) -> None:
        began = time.monotonic()
        pause(recovery)
        stood_still.append(time.monotonic() - began)

    Recovery.pause = timed  # type: ignore[method-assign]
    if options.waiting:
        CatchingUp.run = lambda *_: None  # type: ignore[method-assign]
    run = CatchingUp.run

    def timed_run(self: CatchingUp, *arguments: Any) -> None:
        began = time.monotonic()
        run(self, *arguments)
        (folder / "caught_up").write_text(str(time.monotonic() - began))

    CatchingUp.run = timed_run  # type: ignore[method-assign]
    module = Module(options, folder, number)
    trainer = pl.Trainer(
        strategy=RingStrategy(
            elastic=True, shard_optimizer=options.strategy == "ring_sharded", monitor=False
        ),
        accelerator="cpu",
        max_steps=1000,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(16000, WIDTH)), batch_size=8))
    if number == 0:
        (folder / "0.json").write_text(
            json.dumps({"ends": module.ends, "stood_still": stood_still})
        )


def run_job(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, open_hosts(2, options.rate) as hosts:
        folder = Path(name)
        rate = measured_rate(hosts)
        job = Job(
            Plan(0, 2, hosts=2, respawns=2),
            folder,
            lambda number: train(folder, number, options),
            hosts,
        )
        job.run()
        if job.wrong or job.code:
            logs = "\n".join(
                f"{log.name}:\n{log.read_text()[-3000:]}" for log in folder.glob("*.out")
            )
            raise SystemExit(f"the job ended with code {job.code}: {job.wrong}\n{logs}")
        found = json.loads((folder / "0.json").read_text())
        caught_up = float((folder / "caught_up").read_text())
        sent = re.findall(
            r"([0-9.]+) of ([0-9.]+) MiB of parameters", (folder / "0.out").read_text()
        )
    steps = [
        (1e3 * (after[0] - before[0]), before[1], after[1])
        for before, after in zip(found["ends"], found["ends"][1:], strict=False)
    ]
    join = next(
        index for index, (_, before, after) in enumerate(steps) if (before, after) == (1, 2)
    )
    death = next(
        index for index, (_, before, after) in enumerate(steps) if (before, after) == (2, 1)
    )
    alone = [ms for ms, *_ in steps[death + 1 : join]]
    together = [ms for ms, *_ in steps[join + 1 :]]
    return {
        "gbit/s": round(rate, 1),
        "MiB sent while all waited": [float(mib) for mib in sent[-1]] if sent else "all, in parts",
        "catching up, s": round(caught_up, 2),
        "step of two ranks, median": round(statistics.median(together)),
        "step alone, median": round(statistics.median(alone)) if alone else "none",
        "longest step before the join": round(max(alone)) if alone else "none",
        "step with the join": round(steps[join][0]),
        "of it standing still": round(1e3 * found["stood_still"][-1]),
        "longest step behind it": round(max(together)),
    }


def measured_rate(hosts: Hosts) -> float:
    """Of one connection from the first host to the second, in Gbit/s."""
    size = 2**30
    read, write = os.pipe()
    if not (pid := os.fork()):
        enter(hosts.names[1])
        with socket.create_server((hosts.address(hosts.names[1]), 7)) as listener:
            os.write(write, b"1")
            connection, _ = listener.accept()
            left, buffer = size, bytearray(2**20)
            while left > 0:
                left -= connection.recv_into(buffer)
            connection.sendall(b"1")
        os._exit(0)
    os.read(read, 1)
    if not (sender := os.fork()):
        enter(hosts.names[0])
        with socket.create_connection((hosts.address(hosts.names[1]), 7)) as connection:
            began, buffer = time.monotonic(), bytes(2**20)
            for _ in range(size // len(buffer)):
                connection.sendall(buffer)
            connection.recv(1)
            os.write(write, str(size * 8e-9 / (time.monotonic() - began)).encode())
        os._exit(0)
    for child in (sender, pid):
        os.waitpid(child, 0)
    return float(os.read(read, 64))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=float, default=1008.0, help="of parameters and optimizer state"
    )
    parser.add_argument("--rate", default="10gbit", help="of each host's link, as tc writes it")
    parser.add_argument("--compute", type=float, default=0.0, help="seconds of sleep in each step")
    parser.add_argument(
        "--strategy", choices=("ring_elastic", "ring_sharded"), default="ring_elastic"
    )
    parser.add_argument(
        "--waiting", action="store_true", help="send the state while all ranks wait"
    )
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    for _ in range(options.jobs):
        print(json.dumps(run_job(options), indent=2), flush=True)


if __name__ == "__main__":
    main()
