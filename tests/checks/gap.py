"""The gap meter on real ranks: three bottlenecks planted on purpose."""

from __future__ import annotations

import time

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_ring.errors import ConfigurationError
from lightning_ring.monitor import GapMeter
from tests.checks.models import trainer

SLOW = 0.01  # seconds an image, where a step of 16 takes some hundredths without it


class Images(Dataset):
    def __init__(self, per_image=None):
        self.per_image = per_image

    def __len__(self):
        return 128

    def __getitem__(self, index):
        if self.per_image is not None:
            self.per_image()
        generator = torch.Generator().manual_seed(index)
        return torch.rand(3, 8, 8, generator=generator), index % 10


def slow_disk():
    time.sleep(SLOW)


def heavy_transform():
    until = time.thread_time() + SLOW
    while time.thread_time() < until:
        pass


def costly_collate(items):
    time.sleep(16 * SLOW)
    return default_collate(items)


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Conv2d(3, 4, 3),
            torch.nn.BatchNorm2d(4),
            torch.nn.Flatten(),
            torch.nn.Linear(4 * 36, 10),
        )

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def measured(model, loader, **arguments):
    meter = GapMeter(steps=6, rounds=1)
    run = trainer(max_epochs=1, min_epochs=1, callbacks=[meter], **arguments)
    run.fit(model, loader)
    assert meter.report is not None
    assert run.fit_loop.epoch_progress.current.processed == 0, "it trains nothing"
    return meter


def check_a_slow_disk_is_called_reading():
    report = measured(Model(), DataLoader(Images(slow_disk), 16)).report
    assert report.bottleneck == "reading", report.table()
    assert report.gap > 0.3
    assert report.wait_p95 >= report.wait_p50 > 0.3


def check_a_heavy_transform_is_called_decoding_and_transforms():
    report = measured(Model(), DataLoader(Images(heavy_transform), 16)).report
    assert report.bottleneck == "decoding and transforms", report.table()


def check_one_worker_with_a_costly_collate_is_called_handing_over():
    loader = DataLoader(
        Images(), 16, num_workers=1, collate_fn=costly_collate, persistent_workers=True
    )
    report = measured(Model(), loader, accumulate_grad_batches=3).report
    assert report.bottleneck == "handing over", report.table()


def check_without_an_optimizer_it_says_so():
    class None_(Model):
        def configure_optimizers(self):
            return []

    with pytest.raises(
        ConfigurationError, match=r"None_\.configure_optimizers gave no optimizer to step"
    ):
        measured(None_(), DataLoader(Images(), 16))
