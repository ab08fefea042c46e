"""Lightning's callbacks in planted fits, by the names that a `Plan` has."""

import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

_HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start"),
    *("on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_save_checkpoint"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
)
_ONCE = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start")


class CollectiveInEveryHook(Callback):
    """A user's: it counts, and calls collectives of the strategy.

    Attributes:
        steps: Of the training, in its state.
        hooks: Calls of hooks that are called once for each batch or epoch, in no state.
    """

    def __init__(self):
        self.steps, self.hooks = 0, 0
        self._latest = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state_dict):
        self.steps = self._latest = state_dict["steps"]

    def count(self, trainer, hook):
        self.hooks += hook in _ONCE
        if hook == "on_train_batch_end" and trainer.global_step > self._latest:
            self.steps, self._latest = self.steps + 1, trainer.global_step


def _communicating(hook):
    way = _HOOKS.index(hook) % 4

    def communicate(callback, trainer, *_, **__):
        strategy = trainer.strategy
        if way == 0:
            strategy.barrier(hook)
        elif way == 1:
            assert strategy.broadcast(hook) == hook
        elif way == 2:
            assert strategy.reduce(torch.ones(2), reduce_op="mean").tolist() == [1.0, 1.0]
        else:
            assert strategy.all_gather(torch.ones(1)).min() == 1.0
        callback.count(trainer, hook)

    return communicate


for _hook in _HOOKS:
    setattr(CollectiveInEveryHook, _hook, _communicating(_hook))


def _checkpoints(folder, name, **options):
    return ModelCheckpoint(folder, filename=f"{name}-{{epoch}}-{{step}}", **options)


MAKERS = {
    "save_link": lambda folder: _checkpoints(
        folder / "linked", "linked", every_n_train_steps=3, save_last="link"
    ),
    "every_2_steps": lambda folder: _checkpoints(folder, "second", every_n_train_steps=2),
    "accumulation": lambda _: of_lightning.GradientAccumulationScheduler({0: 1, 1: 2}),
    "finetuning": lambda _: of_lightning.BackboneFinetuning(
        unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.001
    ),
    "pruning": lambda _: of_lightning.ModelPruning("l1_unstructured", amount=0.2),
    "ema": lambda _: of_lightning.EMAWeightAveraging(decay=0.9),
    "swa": lambda _: of_lightning.StochasticWeightAveraging(0.005, swa_epoch_start=1),
    "early_stopping": lambda _: of_lightning.EarlyStopping(
        # a fit resumed from a checkpoint of an epoch's last batch has no validation before its end
        "val_loss",
        patience=1000,
        strict=False,
    ),
    "lr_monitor": lambda _: of_lightning.LearningRateMonitor("step"),
    "user": lambda _: CollectiveInEveryHook(),
}
