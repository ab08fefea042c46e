"""What checks of algorithms whose ranks step alone share: fits that save every epoch, and a loop
of Fabric.
"""

import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ring import RingFabricStrategy
from tests.checks.fabric import launched
from tests.checks.loops import batches, loss_of, network
from tests.checks.models import Classifier, loader, parameters, trainer


class Noted(Classifier):
    """Notes its parameters at validations."""

    def __init__(self):
        super().__init__(batch_norm=True)
        self.validated = []

    def on_validation_start(self):
        self.validated.append(parameters(self))


def fit_and_save(
    strategy, module, folder, train=None, *, ckpt_path=None, callbacks=(), **arguments
):
    """A fit with a validation, and ``folder/epoch=N.ckpt`` of each epoch."""
    saved = ModelCheckpoint(folder, save_top_k=-1, save_on_train_epoch_end=True, filename="{epoch}")
    job = trainer(strategy, callbacks=[saved, *callbacks], enable_checkpointing=True, **arguments)
    job.fit(module, loader() if train is None else train, loader(), ckpt_path=ckpt_path)


def saved_parameters(path, module):
    """Those of a checkpoint, as `parameters` has those of ``module``."""
    saved = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([saved[name].reshape(-1).double() for name, _ in module.named_parameters()])


class FabricLoop:
    """A network with BatchNorm and AdamW, set up by Fabric."""

    def __init__(self, algorithm, seed):
        self.fabric = launched(RingFabricStrategy(algorithm=algorithm))
        module = network(norm=True, seed=seed)
        self.model, self.optimizer = self.fabric.setup(
            module, torch.optim.AdamW(module.parameters(), 0.01)
        )

    def train(self, steps):
        inputs = batches(8)
        for step in steps:
            self.fabric.backward(loss_of(self.model(inputs[step])))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return parameters(self.model)

    @property
    def state(self):
        return {"model": self.model, "optimizer": self.optimizer}
