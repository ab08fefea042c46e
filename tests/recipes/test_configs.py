"""Every configuration file composes, and what it describes can be built."""

import inspect
import json

import lightning as L
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import recipes.start
import recipes.train
from lightning_ring import ElasticStrategy, RingStrategy
from lightning_ring.algorithms.sharded import Sharded
from tests.processes import ROOT
from tests.refusals import refused


def options(group):
    return sorted(file.stem for file in (ROOT / "configs" / group).glob("*.yaml"))


TINY_CATALOGUE = (
    "strategy=auto",
    "trainer.devices=1",
    "data.batch_size=8",
    "data.num_classes=5",
    "data.num_threads=1",
    "data.image_size=32",
    "data.resize=32",
    "data.drawing={seen: 5, unseen: 5, most: 6, fewest: 4, val_photographs: 2, test_photographs: 2,"
    " unseen_photographs: 2, size: 32}",
    "schedule.warmup=0",
    "+trainer.limit_train_batches=2",
    "trainer.max_epochs=1",
    "trainer.check_val_every_n_epoch=1",
    "trainer.log_every_n_steps=1",
)
"""For what trains on the catalogue: five classes of small photographs, and two steps."""


@pytest.mark.parametrize("experiment", options("experiment"))
def test_every_experiment_can_be_built(experiment, composed):
    config = composed(
        f"experiment={experiment}", "trainer.accelerator=cpu", "trainer.precision=32-true"
    )
    assert config.name == experiment
    model, data = recipes.train.model_and_data(config)
    trainer = instantiate(
        config.trainer,
        strategy=instantiate(config.strategy),
        logger=instantiate(config.logger),
        callbacks=[instantiate(callback) for callback in config.callbacks.values() if callback],
    )
    assert isinstance(model, L.LightningModule)
    assert isinstance(trainer, L.Trainer)
    assert isinstance(data, L.LightningDataModule)
    optimizer = instantiate(config.optimizer)(model.parameters())
    assert optimizer.param_groups[0]["lr"] == config.optimizer.lr
    factor = instantiate(config.schedule)(total=40 * config.trainer.max_epochs)
    assert max(factor(step) for step in range(40 * config.trainer.max_epochs)) == pytest.approx(
        1.0, abs=0.01
    )
    assert factor(40 * config.trainer.max_epochs) < 0.01


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ("4k", (4096, 10, 5, 0.9, 2e-4, 40)),
        ("8k", (8192, 17, 5, 0.9, 2e-4, 42)),
        ("32k", (32768, 21.2, 16, 0.94, 2.5e-5, 56)),
    ],
)
def test_lars_has_the_reference_rows_of_mlperf(row, values, composed):
    config = composed("experiment=imagenet_resnet50_lars", f"lars_batch={row}")
    optimizer, warmup, epochs = (
        config.optimizer,
        config.schedule.warmup_epochs,
        config.trainer.max_epochs,
    )
    rates = (optimizer.lr, warmup, optimizer.momentum, optimizer.weight_decay)
    assert (config.data.batch_size, *rates, epochs) == values
    assert config.model.label_smoothing == 0.1


def test_goyals_schedule_warms_up_from_the_unscaled_rate_and_steps_by_epochs(composed):
    config = composed("experiment=imagenet_resnet50")
    rate = [
        config.optimizer.lr * instantiate(config.schedule)(total=900)(10 * epoch)
        for epoch in range(90)
    ]
    assert rate[0] == pytest.approx(0.1)
    assert rate[5] == rate[29] == pytest.approx(0.1 * config.data.batch_size / 256)
    assert [rate[30], rate[60], rate[80]] == pytest.approx([0.32, 0.032, 0.0032])


@pytest.mark.parametrize("schedule", options("schedule"))
def test_every_schedule_can_be_given_in_epochs(schedule, composed):
    config = composed(
        "experiment=imagenet_resnet50", f"schedule={schedule}", "trainer.max_epochs=90"
    )
    factor = instantiate(config.schedule)(total=900)
    warmup = config.schedule.warmup_epochs
    assert factor(0) < 1
    if warmup is not None:
        assert factor(round(10 * warmup)) == 1
    assert factor(899) < 0.2
    longer = dict.fromkeys(["warmup", "warmup_epochs"])
    for key, value, steps in (("warmup", 900, 900), ("warmup_epochs", 95, 950)):
        with refused(f"schedule.{key}={value} .* {steps} .* 900"):
            instantiate(config.schedule)(total=900, **longer | {key: value})


@pytest.mark.parametrize(
    ("name", "kind"),
    [("ring", RingStrategy), ("ring_sharded", RingStrategy), ("ring_elastic", ElasticStrategy)],
)
def test_every_argument_of_the_strategy_can_be_set_and_has_its_default(name, kind, composed):
    config = composed("experiment=debug", f"strategy={name}").strategy
    lightnings = {"accelerator", "parallel_devices", "checkpoint_io", "precision_plugin"}
    arguments = {
        key: parameter.default
        for owner in (RingStrategy, kind)
        for key, parameter in inspect.signature(owner).parameters.items()
        if key not in lightnings | {"of_ring"}
    }
    given = {
        key: instantiate(value) if OmegaConf.is_dict(value) else value
        for key, value in config.items()
    }
    assert given.pop("_target_") == f"lightning_ring.{kind.__name__}"
    sharded = isinstance(given["algorithm"], Sharded)
    assert sharded == (name == "ring_sharded")
    assert given == arguments | ({"algorithm": given["algorithm"]} if sharded else {})
    assert type(instantiate(config)) is kind


@pytest.mark.ranks  # takes seconds
@pytest.mark.parametrize("sampler", ["balanced", "uniform"])  # "pxk": test_identify.py
def test_scan_to_identify_takes_two_steps_and_retrieves(
    sampler, composed, catalogue, tmp_path, capsys
):
    config = composed(
        "experiment=scan_to_identify", *TINY_CATALOGUE, catalogue, f"data.sampler={sampler}"
    )
    metrics = recipes.train.train(config)
    names = {"test/R@1", "test/MAP@R", "test/accuracy", "test_unseen/R@1"}
    assert names | {"test_unseen_in_all/MAP@R"} <= set(metrics)
    assert all(0 <= value <= 1 for value in metrics.values())
    assert "test_unseen/R@1 " in capsys.readouterr().out
    assert (
        torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=False)["global_step"] == 2
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["ranks"], result["steps"], result["metrics"]) == (1, 2, metrics)


def test_packed_images_that_are_not_there_are_told_with_the_command(composed, tmp_path):
    _, data = recipes.train.model_and_data(
        composed("experiment=imagenet_resnet50", f"data.folder={tmp_path}")
    )
    with refused(
        f"{tmp_path} holds no .* lightning-ring pack IMAGES/train {tmp_path}/train",
    ):
        data.setup("fit")


def test_another_number_of_classes_is_told(composed, catalogue):
    config = composed(
        "experiment=scan_to_identify", *TINY_CATALOGUE, catalogue, "data.num_classes=7"
    )
    _, data = recipes.train.model_and_data(config)
    data.prepare_data()
    with refused(r"holds 5 classes.*Set data.num_classes=5"):
        data.setup("fit")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [(name, "poly" if name == "sgd" else "cosine") for name in options("optimizer")],
)
def test_every_optimizer_learns(optimizer, schedule, composed):
    """From the learning rate of its file at the peak down to almost none; biases and BatchNorm
    do not decay.
    """
    config = composed(
        "experiment=debug", f"optimizer={optimizer}", f"schedule={schedule}", "trainer.max_epochs=3"
    )
    config.trainer.limit_train_batches = 1.0
    result = recipes.train.train(config)
    assert result["test/accuracy"] > 0.8
    logs = EventAccumulator(HydraConfig.get().runtime.output_dir)
    logs.Reload()
    (tag,) = {
        tag for tag in logs.Tags()["scalars"] if tag.startswith("lr-") and tag.endswith("pg1")
    }
    rates = [event.value for event in logs.Scalars(tag)]
    assert max(rates) == pytest.approx(config.optimizer.lr, rel=0.02)
    assert rates[-1] < 0.01 * max(rates)


@pytest.mark.parametrize("strategy", options("strategy"))
def test_every_strategy_is_taken_by_a_trainer(strategy, composed):
    config = composed(f"strategy={strategy}")
    trainer = instantiate(config.trainer, strategy=instantiate(config.strategy), logger=False)
    assert strategy == "auto" or trainer.world_size == 2


def test_debug_experiment_takes_two_steps_and_its_checkpoint_resumes(composed, tmp_path, capsys):
    last = tmp_path / "checkpoints" / "last.ckpt"
    metrics = recipes.train.train(composed("experiment=debug"))
    assert metrics["test/images"] == 359
    assert f"test accuracy {metrics['test/accuracy']:.4f} on 359 images" in capsys.readouterr().out
    assert torch.load(last, weights_only=False)["global_step"] == 2
    images = EventAccumulator(str(tmp_path)).Reload().Tags()["images"]
    assert {"train/batch", "val/confusion", "test/confusion"} <= set(images)

    recipes.train.train(composed("experiment=debug", f"ckpt_path={last}", "trainer.max_epochs=2"))
    assert torch.load(last, weights_only=False)["global_step"] == 4
