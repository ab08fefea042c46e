"""Checkpoints of `RingStrategy`: exact resumption, and what one fit leaves to the next."""

import copy
import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_ring import RingStrategy
from lightning_ring.gradients.compression import PowerSGD, TernGrad
from tests.checks.marks import by_world_size
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    ddp,
    fit,
    loader,
    parameters,
    trainer,
)


class _Drops(Classifier):
    """Draws random numbers in training (dropout, and in Python and NumPy), so resuming needs
    every rank's state.
    """

    def __init__(self):
        super().__init__(dropout=0.5)

    def training_step(self, batch, batch_idx):
        import random

        import numpy as np

        return super().training_step(batch, batch_idx) * (
            1 + 0.1 * random.random() + 0.1 * np.random.rand()
        )


@by_world_size
def check_resuming_equals_never_stopping(tmp_path):
    def run(max_epochs, ckpt_path, folder, seed):
        L.seed_everything(5, verbose=False)  # the sampler's order
        module = _Drops()
        # each rank draws numbers of its own; the resumed run begins with others
        torch.manual_seed(seed + RANK)
        checkpoint = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}")
        strategy = RingStrategy(compression=TernGrad(min_numel=0))  # it draws numbers too
        job = trainer(
            strategy, max_epochs=max_epochs, callbacks=[checkpoint], enable_checkpointing=True
        )
        job.fit(module, loader(shuffle=True), ckpt_path=ckpt_path)
        return module

    whole = run(4, None, "whole", seed=1)
    run(2, None, "half", seed=1)
    resumed = run(4, str(tmp_path / "half" / "epoch=1.ckpt"), "rest", seed=99)
    assert torch.equal(
        torch.stack(whole.seen["loss"][-len(resumed.seen["loss"]) :]),
        torch.stack(resumed.seen["loss"]),
    )
    assert torch.equal(parameters(whole), parameters(resumed))
    assert_all_ranks_equal(parameters(resumed))


def check_checkpoint_opens_without_the_ring(tmp_path):
    module = Classifier(batch_norm=True)
    run = fit("ring", module)
    path = WORLD.bcast(str(tmp_path / "plain.ckpt"))
    run.save_checkpoint(path)
    if RANK == 0:
        checkpoint = torch.load(path, weights_only=True)
        assert not any(name.startswith("module.") for name in checkpoint["state_dict"])
        assert len(checkpoint["lightning_ring"]["random_states"]) == SIZE
        fresh = Classifier(batch_norm=True)
        fresh.load_state_dict(checkpoint["state_dict"])
        assert torch.equal(parameters(fresh), parameters(module))
    WORLD.Barrier()
    again = Classifier(batch_norm=True)
    resumed = trainer(ddp(), max_epochs=3)
    resumed.fit(again, loader(), ckpt_path=path)
    assert resumed.current_epoch == 3


def check_residuals_of_other_ranks_are_said_to_be_lost(tmp_path):
    def strategy():
        return RingStrategy(compression=PowerSGD(rank=1, start_iter=2))

    fit(strategy(), Classifier()).save_checkpoint(path := tmp_path / "other.ckpt")
    if RANK == 0:  # as another number of ranks would have left it
        checkpoint = torch.load(path, weights_only=True)
        checkpoint["lightning_ring_algorithm"]["state"]["errors"].append({})
        torch.save(checkpoint, path)
    WORLD.Barrier()
    module = Classifier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(strategy(), max_epochs=4).fit(module, loader(), ckpt_path=path)
    texts = [str(warning.message) for warning in caught]
    said = [text for text in texts if "powersgd residuals" in text]
    assert len(said) == (RANK == 0), said
    assert all(f"of {SIZE + 1} ranks" in text for text in said)
    assert_all_ranks_equal(parameters(module))


def check_a_fit_leaves_nothing_to_the_next_one_nor_to_its_optimizer():
    start, weights = Classifier(), []
    compressor = PowerSGD(rank=1, start_iter=0)
    for _ in range(2):
        module = copy.deepcopy(start)
        run = fit(RingStrategy(compression=compressor), module, max_epochs=1)
        weights.append(parameters(module))
        optimizer = run.optimizers[0]
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()  # by hand, after the fit
    assert torch.equal(*weights)
