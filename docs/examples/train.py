"""A Lightning script for two ranks: ``python train.py``, ``mpirun -n 2 python train.py``, or
``python train.py ring_elastic 100`` for another strategy, and 100 epochs.
"""

import sys

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ring  # noqa: F401  registers "ring" and the others


class Recogniser(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    digits = load_digits()
    images, labels = (
        torch.tensor(digits.data / 16, dtype=torch.float32),
        torch.tensor(digits.target),
    )
    data = DataLoader(TensorDataset(images, labels), batch_size=32, shuffle=True)
    strategy = sys.argv[1] if len(sys.argv) > 1 else "ring"
    epochs = sys.argv[2] if len(sys.argv) > 2 else "5"
    trainer = L.Trainer(
        strategy=strategy,
        devices=2,
        accelerator="cpu",
        max_epochs=int(epochs),
        log_every_n_steps=5,
    )
    trainer.fit(Recogniser(), data)
