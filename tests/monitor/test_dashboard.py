"""TensorBoard's pages in a real browser, what happens without TensorBoard, and the progress
bars.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring.monitor import RingMonitor, dashboard
from tests.monitor.browser import NAMES, executable, open_page, open_tensorboard, wait_for


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(tmp_path, **arguments):
    run = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **arguments,
    )
    run.fit(Model(), DataLoader(TensorDataset(torch.randn(8, 2)), batch_size=4))
    return run


def test_a_csv_logger_gets_the_numbers(tmp_path):
    logger, monitor = CSVLogger(tmp_path), RingMonitor()
    run = fit(tmp_path, callbacks=[monitor], logger=logger, enable_progress_bar=False)
    assert run.global_step == 4
    assert "ring/step_ms" in (Path(run.logger.log_dir) / "metrics.csv").read_text()


def test_charts_are_those_that_have_values():
    judges = [ModelCheckpoint(monitor=name) for name in ("val/R@1", "val/loss", None)]
    trainer = SimpleNamespace(
        strategy=None, optimizers=[], checkpoint_callbacks=judges, enable_validation=False
    )
    charts = dashboard.layout(trainer)
    assert list(charts) == ["Training", "Throughput", "Data", "Optimizer"]
    assert list(charts["Optimizer"]) == ["optimizer, ms"]
    assert list(charts["Training"]) == [
        "loss in training",
        "gradient norm",
        "learning rate",
        "R@1",
    ]
    (tags,) = charts["Training"]["R@1"][1]
    shown = [
        tag for tag in ("val/R@1", "test_unseen/R@1", "val/R@10", "ring/R@1") if re.match(tags, tag)
    ]
    assert shown == ["val/R@1", "test_unseen/R@1"]


class Mine(TQDMProgressBar):
    """As Lightning's documentation has users change a bar."""

    def get_metrics(self, *args):
        items = super().get_metrics(*args)
        items.pop("data", None)
        return items | {"mine": 1}


@pytest.mark.parametrize(
    ("bar", "shown"), [(TQDMProgressBar(), True), (RichProgressBar(), True), (Mine(), False)]
)
def test_bars_show_it_and_a_users_own_decides(tmp_path, bar, shown):
    run = fit(tmp_path, callbacks=[RingMonitor(), bar], logger=False)
    metrics = bar.get_metrics(run, run.lightning_module)
    assert "img/s" in metrics
    assert ("data" in metrics) == shown
    assert ("mine" in metrics) != shown


@pytest.mark.skipif(executable() is None, reason=f"none of {', '.join(NAMES)} is installed")
def test_pages_open_in_a_browser(battery):
    pytest.importorskip("tensorboard")
    check = "check_tensorboard_pages_are_written"
    battery("tests.checks.monitor", 2, check, timeout=150, only=(check,))
    logs = battery.left_by("tests.checks.monitor", 2, check) / "logs"
    with open_tensorboard(logs) as address, open_page(1500, 1000) as page:
        page.goto(f"{address}#custom_scalars")
        wait_for(
            page,
            "Training",
            "Throughput",
            "Communication",
            "Data",
            "Optimizer",
            "gradient norm",
            "backward, ms",
        )
        assert len(page.screenshot()) > 20_000, "an empty page is smaller"
        page.goto("about:blank")  # else an address that differs after its # is not loaded again
        page.goto(f"{address}#hparams")
        wait_for(page, "ring/world_size", "ring/optimizer", "width", "version_0", "1.0000")
