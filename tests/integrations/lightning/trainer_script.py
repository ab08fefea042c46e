"""A user's script: plain Lightning with the ring. ``trainer_script.py ACTION FOLDER``; ACTION
says what goes wrong.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.job.job import current_job

ACTION, FOLDER = sys.argv[1], Path(sys.argv[2])


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 2)

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            if ACTION == "sleep" and (job := current_job()) is not None and job.policy is not None:
                # all other waits have their ordinary timeout
                job.policy.timeout = timedelta(seconds=8)
            (FOLDER / f"step3.{self.global_rank}").write_text(str(os.getpid()))
            if self.global_rank == 1:
                self._go_wrong()
        if ACTION == "slow":
            time.sleep(0.1)
        return self.layer(batch[0]).square().sum()

    def _go_wrong(self):
        if ACTION == "raise":
            raise ValueError("no such photo")
        if ACTION == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if ACTION == "sleep":
            time.sleep(600)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def main():
    kwargs = {}
    if ACTION == "sleep":
        kwargs = {"stall_warning": timedelta(seconds=1)}
    if ACTION == "fork":
        kwargs["start_method"] = ACTION
    trainer = L.Trainer(
        accelerator="cpu",
        devices="auto" if "OMPI_COMM_WORLD_SIZE" in os.environ else 2,
        strategy=RingStrategy(**kwargs),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
        callbacks=[OnExceptionCheckpoint(FOLDER, "stopped")],
    )
    torch.manual_seed(0)
    module = Module()
    num = 2400 if ACTION == "slow" else 240
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(num, 8)), batch_size=4))
    if ACTION == "raise-after" and trainer.global_rank == 1:
        raise ValueError("no such photo")
    trainer.strategy.barrier()
    rank = os.environ.get("LOCAL_RANK", trainer.global_rank)
    (FOLDER / f"done.{rank}").write_text(
        f"{trainer.world_size} {module.layer.weight.sum().item()!r}"
    )


if __name__ == "__main__":
    main()
