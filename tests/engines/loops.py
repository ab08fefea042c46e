"""Training loops that the tests of this folder have an engine run, and data for them.

``python -m tests.engines.loops FILE`` writes what they are compared with: `trained` on two ranks
of Lightning's own strategy.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, TensorDataset

import lightning_ring  # noqa: F401  # registers the strategies
from lightning_ring.job.job import current_job
from tests import forked
from tests.processes import run

EPOCHS = 3


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layers(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def samples():
    torch.manual_seed(1)
    x = torch.randn(48, 8)
    return TensorDataset(x, x.sum(1, keepdim=True))


def trained(strategy, ckpt_path=None, **options):
    """Fit on this worker. Returns what the ranks have to agree on, and where they were."""
    L.seed_everything(2)
    model = Regression()
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"enable_checkpointing": False} | options),
    )
    trainer.fit(model, DataLoader(samples(), batch_size=4), ckpt_path=ckpt_path)
    job = current_job()
    return {
        "rank": trainer.global_rank,
        "world_size": trainer.world_size,
        "source": "" if job is None else job.info.source,
        "steps": trainer.global_step,
        "weights": [value.tolist() for value in model.state_dict().values()],
    }


def weights_of_ddp(file):
    """After the same fit on two ranks without an engine, which ``file`` is written for."""
    done = run([*forked.python(), "-m", __name__, str(file)], **forked.ranks())
    assert done.returncode == 0, done.stdout
    return json.loads(file.read_text())


class KilledOnce(L.Callback):
    """Kills ``rank`` in the second epoch, or with ``parent`` the engine's process that started it,
    once the engine has written ``checkpoint`` (a file's name) into ``folder``. The file
    ``folder/killed`` says that it has done so."""

    def __init__(self, folder, checkpoint, *, rank=1, parent=False):
        self._folder = folder
        self._rank = rank
        self._checkpoint = checkpoint
        self._parent = parent

    def on_train_batch_start(self, trainer, *_):
        killed = self._folder / "killed"
        if trainer.global_rank != self._rank or trainer.current_epoch != 1 or killed.exists():
            return
        late = time.monotonic() + 60
        while not list(self._folder.rglob(self._checkpoint)):
            assert time.monotonic() < late, f"{self._checkpoint} was not written"
            time.sleep(0.1)
        killed.touch()
        os.kill(os.getppid() if self._parent else os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the watch ends a rank whose parent has gone


if __name__ == "__main__":
    # named, else Lightning starts MPI to look for ranks
    found = trained("ddp", devices=2, plugins=[LightningEnvironment()])
    if found["rank"] == 0:
        Path(sys.argv[1]).write_text(json.dumps(found["weights"]))
