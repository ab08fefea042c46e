"""A user's script under Slurm: ``train_script.py ACTION FOLDER``."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import lightning_ring  # noqa: F401  registers "ring"
from lightning_ring.errors import RankDiscoveryError

ACTION, FOLDER = sys.argv[1], Path(sys.argv[2])
LONG = 4000  # steps that no test waits for


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(8, 2)
        self.first_step = None

    def training_step(self, batch, batch_idx):
        self.first_step = self.trainer.global_step if self.first_step is None else self.first_step
        if batch_idx == 3:
            (FOLDER / f"step3.{self.global_rank}").touch()
            if ACTION == "die" and self.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        if ACTION in ("stop", "requeue", "die"):
            time.sleep(0.02)
        return self.layer(batch[0]).square().sum()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.001)


def fit(strategy, **arguments):
    trainer = L.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
        **arguments,
    )
    module = Module()
    data = TensorDataset(torch.randn(LONG, 8, generator=torch.Generator().manual_seed(1)))
    trainer.fit(
        module,
        DataLoader(data, batch_size=1, num_workers=1 if ACTION in ("stop", "requeue") else 0),
    )
    return trainer, module


def main():
    restarted = "SLURM_RESTART_COUNT" in os.environ
    callbacks = [OnExceptionCheckpoint(FOLDER, "stopped")] if ACTION == "stop" else []
    try:
        fit("ring", max_steps=6, devices=7, enable_checkpointing=False)
    except RankDiscoveryError as error:
        told = str(error)
    strategy = "ring_sharded" if ACTION == "requeue" else "ring"
    steps = 8 if ACTION == "plain" else 10**6
    if restarted:
        steps = torch.load(FOLDER / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"] + 5
    trainer, module = fit(
        strategy,
        max_steps=steps,
        max_epochs=-1,
        callbacks=callbacks,
        enable_checkpointing=ACTION == "stop",
    )
    modules = [module]
    if ACTION == "plain":
        modules.append(fit("ring_sharded", max_steps=8, enable_checkpointing=False)[1])
    facts = {
        "told": told,
        "source": trainer.strategy.ring_environment.discover().source,
        "place": [trainer.world_size, trainer.local_rank, trainer.node_rank],
        "weights": [one.layer.weight.sum().item() for one in modules],
        "first_step": module.first_step,
        "steps": trainer.global_step,
    }
    name = f"{os.environ.get('SLURM_STEP_ID')}.{trainer.global_rank}.json"
    (FOLDER / name).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
