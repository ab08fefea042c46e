"""What checks of algorithms whose ranks step alone share: fits that save every epoch, and a loop
of Fabric.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_ring import RingFabricStrategy
from tests.checks.fabric import ring
from tests.checks.loops import batches, loss_of, network
from tests.checks.models import Classifier, loader, parameters, trainer


class Noted(Classifier):
    """Notes its parameters at validations."""

    def __init__(self) -> None:
        super().__init__(batch_norm=True)
        self.validated: list[Tensor] = []

    def on_validation_start(self) -> None:
        self.validated.append(parameters(self))


def fit_and_save(
    strategy: Any,
    module: L.LightningModule,
    folder: Path,
    train: Iterable[Any] | None = None,
    *,
    ckpt_path: str | None = None,
    callbacks: Sequence[L.Callback] = (),
    **arguments: Any,
) -> None:
    """A fit with a validation, and ``folder/epoch=N.ckpt`` of each epoch."""
    saved = ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True, filename="{epoch}")
    job = trainer(strategy, callbacks=[saved, *callbacks], enable_checkpointing=True, **arguments)
    job.fit(module, loader() if train is None else train, loader(), ckpt_path=ckpt_path)


def saved_parameters(path: Path, module: nn.Module) -> Tensor:
    """Those of a checkpoint, as `parameters` has those of ``module``."""
    saved = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([saved[name].reshape(-1).double() for name, _ in module.named_parameters()])


class FabricLoop:
    """A network with BatchNorm and AdamW, set up by Fabric."""

    def __init__(self, algorithm: Any, seed: int) -> None:
        self.fabric = ring(RingFabricStrategy(algorithm=algorithm))
        module = network(norm=True, seed=seed)
        self.model, self.optimizer = self.fabric.setup(
            module, torch.optim.AdamW(module.parameters(), 0.01)
        )

    def train(self, steps: range) -> Tensor:
        inputs = batches(8)
        for step in steps:
            self.fabric.backward(loss_of(self.model(inputs[step])))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return parameters(self.model)

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}
