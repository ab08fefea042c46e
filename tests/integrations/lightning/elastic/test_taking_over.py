"""What a new rank 0 finds of the one before, and what a step that is done again finds of itself.
No ranks.
"""

import csv
import random
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, csv_logs
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import nn
from torchmetrics import CatMetric, MeanMetric

from lightning_ring.elastic.undo import remember
from lightning_ring.integrations.lightning.elastic.calls import HostCalls
from lightning_ring.integrations.lightning.elastic.checkpoints import (
    _changed_on_all,
    plain_attributes,
    take_attributes,
)
from lightning_ring.integrations.lightning.elastic.loops import _validate
from lightning_ring.integrations.lightning.elastic.undo import (
    remember_callbacks,
    remember_metrics,
)
from lightning_ring.integrations.lightning.elastic.watchers import (
    go_on_with_csv,
    names_of,
    take_names,
)
from tests.thread_ranks import run_ranks


@pytest.mark.parametrize("dies", [False, True])
def test_the_next_rank_0_goes_on_with_its_metrics_file(dies, tmp_path):
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
        rows = [(row["step"], row["loss"], row["other"]) for row in csv.DictReader(file)]
    assert rows == [("0", "3.0", ""), ("1", "2.0", "1.0")]
    assert len(list((tmp_path / "csv").iterdir())) == 1


def write_and_die(log_dir):
    ExperimentWriter(log_dir)
    raise KeyboardInterrupt


def test_a_next_rank_0_that_finds_no_file_begins_one(tmp_path):
    successor = CSVLogger(tmp_path, name="csv", version=4)
    go_on_with_csv(successor)
    successor.log_metrics({"loss": 2.0}, step=1)
    successor.save()
    metrics = tmp_path / "csv" / "version_4" / "metrics.csv"
    assert metrics.read_text().startswith("loss,step")


def test_metrics_are_put_back_as_often_as_a_part_is_run_again():
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


def test_callbacks_that_save_or_stop_are_put_back():
    checkpoint, stopping = ModelCheckpoint(monitor="val_loss"), EarlyStopping("val_loss")
    restore = remember_callbacks(SimpleNamespace(callbacks=[checkpoint, stopping]))
    for _ in range(2):
        checkpoint.best_k_models["a.ckpt"] = torch.tensor(1.0)
        checkpoint._last_global_step_saved = 12
        stopping.wait_count = 3
        restore()
        assert (checkpoint.best_k_models, checkpoint._last_global_step_saved) == ({}, 0)
        assert stopping.wait_count == 0


def test_a_forward_that_is_taken_back_leaves_buffers_and_generators_as_they_were():
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


def test_a_process_that_joins_takes_attributes_that_training_has_changed_alike_on_all_ranks():
    def fit(is_main):
        counting = Callback()
        counting.count, counting.is_main = 0, is_main
        counting.lines, counting.seen = [], torch.zeros(1)
        module = pl.LightningModule()
        module.best = 0.0
        settings = {"accumulate_grad_batches": 1, "_private": 0, "lightning_module": module}
        return SimpleNamespace(
            callbacks=[ModelCheckpoint(), counting, TQDMProgressBar()], **settings
        )

    first, other, new = fit(True), fit(False), fit(False)
    begun = plain_attributes(first)
    for rank, trainer in enumerate((first, other)):
        saving, counting, bar = trainer.callbacks
        saving._last_checkpoint_saved, saving._last_time_checked = "last.ckpt", 7.0
        counting.count, counting.seen, bar.shown = 3, torch.ones(1), 1
        counting.lines.append(f"of rank {rank}")
        trainer.lightning_module.best, trainer.accumulate_grad_batches, trainer._private = 0.5, 2, 1
    changed = run_ranks(2, lambda comm: _changed_on_all(begun, (first, other)[comm.rank], comm))
    take_attributes(new, changed[0])
    saving, counting, bar = new.callbacks
    assert (saving._last_checkpoint_saved, saving._last_time_checked) == ("last.ckpt", None)
    assert (counting.count, counting.is_main) == (3, False)
    assert (counting.lines, float(counting.seen)) == ([], 0.0)
    assert (new.lightning_module.best, new.accumulate_grad_batches, new._private) == (0.5, 2, 0)
    assert not hasattr(bar, "shown")


def test_a_validation_that_runs_again_begins_with_the_decision_of_the_first():
    strategy, seen = MagicMock(and_barrier=lambda run: run()), []
    strategy.lightning_module = pl.LightningModule()
    strategy.fit_trainer.callbacks, strategy.fit_trainer.should_stop = [], False

    def validate():
        seen.append(strategy.fit_trainer.should_stop)
        strategy.fit_trainer.should_stop = True
        if len(seen) < 3:
            raise RuntimeError("a rank has died")

    fit = SimpleNamespace(calls=HostCalls(lambda error: None), recovery=SimpleNamespace(view=None))
    _validate(strategy, fit, validate)
    assert seen == [False] * 3
