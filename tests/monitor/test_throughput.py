"""ThroughputMonitor counts images and seconds of training, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ring.monitor import ThroughputMonitor
from lightning_ring.monitor.throughput import first_dimension


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow(Dataset):
    """Ten samples; loading one takes 0.25 s."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.now += 0.25
        return torch.ones(2)


class Model(L.LightningModule):
    """A training step takes 1 s (the first ``slow_steps`` 50 s), a validation step and a checkpoint 1,000 s."""

    def __init__(self, clock: Clock, slow_steps: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.clock = clock
        self.slow_steps = slow_steps

    def training_step(self, batch, batch_idx):
        self.clock.now += 50 if self.global_step < self.slow_steps else 1
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        self.clock.now += 1000

    def on_save_checkpoint(self, checkpoint):
        self.clock.now += 1000

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorder(L.Callback):
    def __init__(self) -> None:
        self.bars: list[dict[str, float]] = []

    def on_before_zero_grad(self, trainer, *_):
        self.bars.append(dict(trainer.progress_bar_metrics))


def fit(tmp_path, *, slow_steps=0, val_check_interval=1.0, epochs=3, **monitor_args):
    clock = Clock()
    monitor = ThroughputMonitor(clock=clock, **monitor_args)
    recorder = Recorder()
    data = Slow(clock)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        callbacks=[monitor, recorder, L.pytorch.callbacks.ModelCheckpoint(tmp_path)],
        logger=L.pytorch.loggers.CSVLogger(tmp_path),
        log_every_n_steps=1,
        val_check_interval=val_check_interval,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Model(clock, slow_steps), DataLoader(data, batch_size=4), DataLoader(data, batch_size=5))
    return monitor, trainer, recorder


def test_counts_real_batches_without_validation(tmp_path):
    """Batches of 4, 4 and 2 images: 10 images an epoch, 3 s of steps, 2.5 s of loading."""
    monitor, trainer, recorder = fit(tmp_path, warmup=0)
    assert monitor.images_per_second == pytest.approx(10 / 5.5)
    assert trainer.logged_metrics["images_per_second"] == pytest.approx(10 / 5.5, rel=1e-3)
    assert recorder.bars[-1]["images_per_second"] > 0


def test_leaves_out_validation_in_the_middle_of_an_epoch(tmp_path):
    """After the validation that follows each batch, loading the next is not seen; the step and its images are."""
    monitor, *_ = fit(tmp_path, warmup=0, epochs=1, val_check_interval=1)
    assert 10 / 5.5 <= monitor.images_per_second <= 10 / 3


def test_leaves_out_warm_up(tmp_path):
    monitor, *_ = fit(tmp_path, warmup=3, slow_steps=3)
    assert monitor.images_per_second == pytest.approx(10 / 5.5)
    monitor, *_ = fit(tmp_path, warmup=0, slow_steps=3)
    assert monitor.images_per_second < 1


def test_window_forgets(tmp_path):
    monitor, *_ = fit(tmp_path, warmup=0, window=1)
    assert monitor.images_per_second == pytest.approx(2 / 1.5)


def test_nothing_is_logged_while_warming_up(tmp_path):
    monitor, trainer, _ = fit(tmp_path, warmup=100)
    assert monitor.images_per_second == 0
    assert "images_per_second" not in trainer.logged_metrics


def test_rate_is_of_all_ranks_and_logged_from_the_host():
    clock, logged = Clock(), {}
    monitor = ThroughputMonitor(warmup=0, clock=clock)
    trainer = SimpleNamespace(world_size=4)
    module = SimpleNamespace(log=lambda name, value, **options: logged.update({name: (value, options)}))
    monitor.on_train_start(trainer, module)
    monitor.on_train_epoch_start(trainer, module)
    monitor.on_train_batch_start(trainer, module, None, 0)
    clock.now += 2
    monitor.on_train_batch_end(trainer, module, None, (torch.ones(32, 1), torch.ones(32)), 0)
    value, options = logged["images_per_second"]
    assert value == 4 * 32 / 2
    assert value.device.type == "cpu"
    assert options["prog_bar"]


def test_batch_size_is_the_first_tensors_length():
    assert first_dimension({"scale": torch.tensor(1.0), "images": [torch.ones(7, 3), torch.ones(9)]}) == 7
    with pytest.raises(TypeError, match=r"^There is no tensor.* in a batch of type list.* batch_size="):
        first_dimension(["no", "tensor"])  # whichever callback asks


@pytest.mark.parametrize("arguments", [{"window": 0}, {"warmup": -1}])
def test_arguments_out_of_range(arguments):
    with pytest.raises(ValueError, match="window >= 1"):
        ThroughputMonitor(**arguments)
