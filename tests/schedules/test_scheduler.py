import pytest
import torch
from lightning import LightningModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_ring.optim import LARS
from lightning_ring.schedules import WarmupLR, warmup_cosine, warmup_multistep, warmup_poly
from tests.optim.ways import random_params, take_steps
from tests.trainers import quiet_trainer

SCHEDULE = warmup_poly(total=20, warmup=5, start_factor=0.1)


def test_learning_rate_of_every_group_follows_the_schedule():
    params = random_params()
    optimizer = LARS([{"params": params[:4], "lr": 0.3}, {"params": params[4:]}], lr=0.5)
    scheduler = WarmupLR(optimizer, SCHEDULE)
    for step in range(25):
        assert [group["lr"] for group in optimizer.param_groups] == [
            0.3 * SCHEDULE(step),
            0.5 * SCHEDULE(step),
        ]
        assert scheduler.get_last_lr() == [0.3 * SCHEDULE(step), 0.5 * SCHEDULE(step)]
        take_steps(optimizer, params, step, step + 1)
        scheduler.step()


def test_refuses_what_is_no_schedule():
    optimizer = LARS(random_params())
    with pytest.raises(ValueError, match="expected a function"):
        WarmupLR(optimizer, 0.5)
    with pytest.raises(ValueError, match="expected a factor >= 0"):
        WarmupLR(optimizer, lambda step: -1.0)
    with pytest.raises(ValueError, match="not longer than warmup"):
        WarmupLR(optimizer, warmup_cosine(total=100, warmup=500))


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.rates = []

    def training_step(self, batch, _):
        return self.layer(batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = LARS(self.parameters(), lr=0.5)
        schedule = warmup_multistep([4], warmup=3, start_factor=0.25)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": WarmupLR(optimizer, schedule), "interval": "step"},
        }


def test_lightning_steps_it_once_for_each_optimizer_step():
    module = Regression()
    trainer = quiet_trainer(max_epochs=2, accumulate_grad_batches=4)
    trainer.fit(module, DataLoader(torch.randn(12, 4), batch_size=1))
    assert module.rates == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.05, 0.05])


def test_a_checkpoint_in_the_middle_of_warmup_is_resumed_by_lightning(tmp_path):
    data = DataLoader(torch.randn(8, 4), batch_size=1)
    whole, begun, resumed = Regression(), Regression(), Regression()
    quiet_trainer(max_steps=6).fit(whole, data)
    trainer = quiet_trainer(max_steps=2)
    trainer.fit(begun, data)
    trainer.save_checkpoint(tmp_path / "middle.ckpt")
    quiet_trainer(max_steps=6).fit(resumed, data, ckpt_path=tmp_path / "middle.ckpt")
    assert len(whole.rates) == 6
    assert begun.rates + resumed.rates == whole.rates
