"""A plain loop whose ranks may die: ``training_rank.py FOLDER BACKEND STEPS [--die DEATH ...]
[--from FILE]``.

A DEATH is NUMBER:STEP:PLACE. PLACE is ``forward``, the number of a gradient in backward, ``commit``
(before the barrier), ``step`` (behind it) or ``recovery``. Each process appends the number of every
step that it has finished, the position and a digest of weights and optimizer state to
``FOLDER/NUMBER.log``. The state with which the latest view began lies in ``FOLDER/state.pt``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.elastic.ending import end_job_on_error
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.loop import ElasticLoop
from lightning_ring.membership.member import Member

CPU, LIMIT, BATCH, WIDTH = torch.device("cpu"), timedelta(seconds=60), 4, 48


class Rank:
    def __init__(self, options: argparse.Namespace) -> None:
        self.folder = Path(options.folder)
        self.start = options.start
        self.seconds = options.seconds
        self.deaths = {
            (int(n), int(s), place) for n, s, place in (death.split(":") for death in options.die)
        }
        self.member = Member()
        self.member.open()
        end_job_on_error(self.member)
        torch.set_num_threads(1)
        torch.manual_seed(5 + self.member.number)  # rank 0's values count
        blocks = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
            for _ in range(3)
        ]
        self.model = nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(WIDTH, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.algorithm = Averaging(bucket_cap_mb=0.02)
        generations = Generations(self.member, options.backend, CPU, LIMIT, LIMIT)
        self.loop = ElasticLoop(
            self.member, generations, self.algorithm, self.model, [self.optimizer]
        )
        self.num_gradients = 0
        for param in self.model.parameters():
            param.register_post_accumulate_grad_hook(self.count_gradient)
        for name, place in (("agree", "commit"), ("commit", "step"), ("after", "recovery")):
            self.die_before(name, place)

    def die_before(self, method: str, place: str) -> None:
        recovery = self.loop._recovery
        original = getattr(recovery, method)

        def dying(*args: object) -> None:
            self.die(place)
            original(*args)

        setattr(recovery, method, dying)

    def die(self, place: str) -> None:
        if (self.member.number, self.loop.step, place) in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def count_gradient(self, _: nn.Parameter) -> None:
        self.num_gradients += 1
        self.die(str(self.num_gradients))

    def compute_gradients(self) -> None:
        self.num_gradients = 0
        time.sleep(self.seconds)
        loop = self.loop
        samples = []
        for index in range(
            loop.position + loop.rank, loop.position + BATCH * loop.world_size, loop.world_size
        ):
            samples.append(torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)))
        batch = torch.stack(samples)
        self.die("forward")
        # dropout, so that a fresh job draws the same
        torch.manual_seed(loop.step * 100 + loop.rank)
        loss = nn.functional.mse_loss(self.model(batch), batch.sum(1, keepdim=True))
        with self.algorithm.backward():
            loss.backward()

    def digest(self) -> str:
        digest = hashlib.blake2b(digest_size=8)
        for param in self.model.parameters():
            digest.update(param.detach().numpy().tobytes())
            for value in self.optimizer.state[param].values():
                digest.update(value.numpy().tobytes())
        return digest.hexdigest()

    def keep_state(self) -> None:
        """When a view has begun: what a job of its ranks starts from to compute the same."""
        if self.loop.rank == 0:
            state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
            place = {
                "position": self.loop.position,
                "step": self.loop.step,
                "world_size": self.loop.world_size,
            }
            torch.save(state | place, self.folder / "new.pt")
            os.replace(self.folder / "new.pt", self.folder / "state.pt")

    def train(self, steps: int) -> None:
        loop = self.loop
        loop.start()
        if self.start:
            kept = torch.load(self.start)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            loop.position, loop._recovery.step = kept["position"], kept["step"]
        view = None
        while loop.step < steps:
            if view is not loop._recovery.view:
                view = loop._recovery.view
                self.keep_state()
            loop.take_step(self.compute_gradients, samples=BATCH)
            with (self.folder / f"{self.member.number}.log").open("a") as log:
                log.write(json.dumps([loop.step, loop.position, self.digest()]) + "\n")
        loop.finish()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d):  # a forward that was taken back does not count
                assert self.start or module.num_batches_tracked == steps, (
                    module.num_batches_tracked,
                    steps,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("backend")
    parser.add_argument("steps", type=int)
    parser.add_argument("--die", nargs="*", default=[])
    parser.add_argument("--from", dest="start")
    parser.add_argument("--seconds", type=float, default=0.0, help="that a step takes longer")
    options = parser.parse_args()
    Rank(options).train(options.steps)
