"""What a new rank 0 finds of the one before, and what a step that is done again finds of itself. No ranks."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, csv_logs
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_ring.elastic.undo import remember
from lightning_ring.integrations.lightning.elastic.rank_zero_files import go_on_with_csv, names_of, take_names
from lightning_ring.integrations.lightning.elastic.step_undo import remember_callbacks, remember_metrics


@pytest.mark.parametrize("dies", [False, True])
def test_the_next_rank_0_goes_on_with_its_metrics_file(dies: bool, tmp_path: Path) -> None:
    """Also where another one ``dies`` while it takes the file over."""
    first, between, successor = (CSVLogger(tmp_path, name="csv") for _ in range(3))
    first.log_metrics({"loss": 3.0}, step=0)
    first.save()
    (tmp_path / "csv" / "version_0" / "metrics.csv").open("a").write("2.5")  # half a line
    take_names([between, successor], names_of([first]) * 2)
    if dies:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(csv_logs, "ExperimentWriter", write_and_die)
            with pytest.raises(KeyboardInterrupt):
                go_on_with_csv(between)
    go_on_with_csv(successor)
    successor.log_metrics({"loss": 2.0, "other": 1.0}, step=1)
    successor.save()
    with (tmp_path / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["loss"], row["other"]) for row in rows] == [("0", "3.0", ""), ("1", "2.0", "1.0")]
    assert len(list((tmp_path / "csv").iterdir())) == 1


def write_and_die(log_dir: str) -> None:
    ExperimentWriter(log_dir)
    raise KeyboardInterrupt


def test_a_next_rank_0_that_finds_no_file_begins_one(tmp_path: Path) -> None:
    successor = CSVLogger(tmp_path, name="csv", version=4)
    go_on_with_csv(successor)
    successor.log_metrics({"loss": 2.0}, step=1)
    successor.save()
    assert (tmp_path / "csv" / "version_4" / "metrics.csv").read_text().splitlines()[0] == "loss,step"


def test_metrics_are_put_back_as_often_as_a_part_is_run_again() -> None:
    module = nn.ModuleDict({"mean": MeanMetric(), "all": CatMetric()})
    module["mean"].update(2.0)
    module["all"].update(torch.tensor([1.0]))
    restore = remember_metrics(module)
    for _ in range(2):
        module["mean"].update(50.0)
        module["all"].update(torch.tensor([7.0, 8.0]))
        restore()
        assert module["mean"].compute() == 2.0
        assert module["mean"].update_count == 1
        assert module["all"].compute() == 1.0


def test_callbacks_that_save_or_stop_are_put_back() -> None:
    checkpoint, stopping = ModelCheckpoint(monitor="val_loss", save_top_k=2), EarlyStopping("val_loss")
    restore = remember_callbacks(SimpleNamespace(callbacks=[checkpoint, stopping]))  # type: ignore[arg-type]
    for _ in range(2):
        checkpoint.best_k_models["a.ckpt"] = torch.tensor(1.0)
        checkpoint._last_global_step_saved = 12
        stopping.wait_count = 3
        restore()
        assert (checkpoint.best_k_models, checkpoint._last_global_step_saved, stopping.wait_count) == ({}, 0, 0)


def test_a_forward_that_is_taken_back_leaves_buffers_and_generators_as_they_were() -> None:
    module = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5))
    numpy.random.randn()  # half of what was drawn waits for the next call
    restore, batch = remember(module), torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    first, drawn = module(batch), (random.random(), numpy.random.randn())
    restore()
    assert (random.random(), numpy.random.randn()) == drawn
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])
    assert torch.equal(module(batch), first)
