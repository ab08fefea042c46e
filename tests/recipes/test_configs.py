"""Every configuration file composes, and what it describes can be built."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import recipes.train
from tests.launch import ROOT


def options(group: str) -> list[str]:
    return sorted(file.stem for file in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_can_be_built(experiment, composed):
    config = composed(f"experiment={experiment}")
    assert config.name == experiment
    model = instantiate(config.model, optimizer=instantiate(config.optimizer), schedule=instantiate(config.schedule))
    trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        logger=instantiate(config.logger),
        callbacks=[instantiate(callback) for callback in config.callbacks.values()],
    )
    data = instantiate(config.data)
    assert isinstance(model, L.LightningModule)
    assert isinstance(trainer, L.Trainer)
    assert isinstance(data, L.LightningDataModule)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    assert len(images) == config.data.batch_size
    assert model(images).shape == (len(labels), config.model.network.num_classes)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    sorted({(name, "cosine") for name in options("optimizer")} | {("sgd", name) for name in options("schedule")}),
)
def test_every_optimizer_and_every_schedule_learns(optimizer, schedule, composed):
    """From the learning rate of its file at the peak down to almost none; biases and BatchNorm do not decay."""
    config = composed("experiment=debug", f"optimizer={optimizer}", f"schedule={schedule}", "trainer.max_epochs=3")
    config.trainer.limit_train_batches = 1.0
    result = recipes.train.train(config)
    assert result["test/accuracy"] > 0.8
    logs = EventAccumulator(HydraConfig.get().runtime.output_dir)
    logs.Reload()
    (tag,) = {tag for tag in logs.Tags()["scalars"] if tag.startswith("lr-") and tag.endswith("pg1")}
    rates = [event.value for event in logs.Scalars(tag)]
    assert max(rates) == pytest.approx(config.optimizer.lr, rel=0.02)
    assert rates[-1] < 0.01 * max(rates)


def test_default_is_the_digits_experiment(composed):
    config = composed()
    assert config.name == "digits"
    assert HydraConfig.get().runtime.choices.strategy == "ring"
    assert (config.trainer.accelerator, config.trainer.devices) == ("cpu", 2)


@pytest.mark.parametrize("strategy", options("strategy"))
def test_every_strategy_is_taken_by_a_trainer(strategy, composed):
    config = composed(f"strategy={strategy}")
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy), logger=False)
    assert strategy == "auto" or trainer.world_size == 2


@pytest.mark.parametrize("logger", options("logger"))
def test_every_logger_writes_to_the_folder_of_the_run(logger, composed, tmp_path):
    assert Path(instantiate(composed(f"logger={logger}").logger).log_dir) == tmp_path


def test_folder_of_a_run_is_rank_zeros_only(monkeypatch):
    for name in recipes.train.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert recipes.train.rank_zero_folder("logs/x") == "logs/x"
    monkeypatch.setenv("SLURM_PROCID", "0")  # an sbatch job sets it to 0 for all that mpirun starts inside
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    other = Path(recipes.train.rank_zero_folder("logs/x"))
    assert other.is_dir()
    assert other != Path("logs/x")


def test_debug_experiment_takes_two_steps_and_its_checkpoint_resumes(composed, tmp_path, capsys):
    last = tmp_path / "checkpoints" / "last.ckpt"
    metrics = recipes.train.train(composed("experiment=debug"))
    assert metrics["test/images"] == 359
    assert f"test accuracy {metrics['test/accuracy']:.4f} on 359 images" in capsys.readouterr().out
    assert torch.load(last, weights_only=False)["global_step"] == 2

    recipes.train.train(composed("experiment=debug", f"ckpt_path={last}", "trainer.max_epochs=2"))
    assert torch.load(last, weights_only=False)["global_step"] == 4


def test_run_is_the_same_for_the_same_seed(composed):
    losses = [recipes.train.train(composed("experiment=debug", f"seed={seed}"))["test/loss"] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
