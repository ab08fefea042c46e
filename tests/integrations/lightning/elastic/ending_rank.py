"""Fits of a plain script, which ``python ending_rank.py FOLDER FITS [EVENT]`` starts as 3 ranks.

EVENT is NUMBER:STEP:SIGNAL[:PLACE[:FIT]]: process NUMBER sends itself the signal when STEP steps of
fit FIT (0) are finished; PLACE is ``step``, the training step, ``hook``,
``on_before_optimizer_step``, where ranks communicate, ``train_end``, or ``after``: the code after
the fit, at any step. ``exit3`` for SIGNAL: it ends with exit code 3.
"""

import os
import sys
import time
from datetime import timedelta

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import ElasticStrategy
from lightning_ring.algorithms.sharded import Sharded

FOLDER, FITS, EVENT = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
SAMPLES = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))


class Module(pl.LightningModule):
    def __init__(self, fit):
        super().__init__()
        torch.manual_seed(1)
        self.fit = fit
        self.net = nn.Linear(4, 1)

    def happen(self, place):
        for number, step, signum, *where in (event.split(":") for event in EVENT):
            here = os.environ["RING_MEMBER"] == number and step in ("-", str(self.global_step))
            if here and [*where, *["step", "0"][len(where) :]] == [place, str(self.fit)]:
                # behind a hook: the others have its sum too, and wait for the step to be agreed on
                time.sleep(0.5)
                if signum == "exit3":
                    os._exit(3)
                os.kill(os.getpid(), int(signum))

    def training_step(self, batch, batch_idx):
        self.happen("step")
        return self.net(batch[0]).square().mean()

    def on_before_optimizer_step(self, optimizer):
        ranks = self.trainer.strategy.reduce(torch.ones(()), reduce_op="sum")
        assert ranks == self.trainer.world_size, (ranks, self.trainer.world_size)
        self.happen("hook")

    def on_train_end(self):
        self.happen("train_end")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


for fit in range(FITS):
    strategy = ElasticStrategy(
        backend="gloo",
        min_ranks=int(os.environ.get("MIN", "1")),
        wait_for_ranks=timedelta(seconds=1),
        algorithm=Sharded() if "SHARD" in os.environ else None,
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=3,
        max_epochs=2,
        logger=False,
        callbacks=[ModelCheckpoint(FOLDER)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module(fit)
    trainer.fit(module, DataLoader(TensorDataset(SAMPLES), batch_size=4))
    told = (
        f"{trainer.world_size} ranks, {trainer.global_step} steps, {strategy.rank_changes.deaths} "
        "deaths"
    )
    print(f"fit {fit}: {told}, rank {trainer.global_rank}\n", end="", flush=True)
    module.happen("after")
