"""Checks of the recogniser on real ranks: against one process on the whole batch."""

import copy
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.algorithms.local import LocalSGD
from lightning_ring.errors import ConfigurationError
from lightning_ring.retrieval import retrieval_metrics
from recipes.batch_size import even_batch_size
from recipes.data.tensors import each_once
from recipes.recogniser import Recogniser
from tests.checks.models import RANK, SIZE, assert_all_ranks_equal, ddp, parameters, trainer
from tests.processes import ROOT

ITEMS, CLASSES, EACH = 26, 5, 6


def recogniser(**options):
    """Without BatchNorm in the embedder, so that a rank's part of a batch is treated as in the
    whole batch.
    """
    torch.manual_seed(3)
    embedder = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    options = {"classification_weight": 0.0, "metric_loss": loss("triplet"), **options}
    return Recogniser(embedder, 8, CLASSES, partial(torch.optim.SGD, lr=0.5), **options)


def loss(name, **changes):
    """As ``loss=NAME`` of the configuration."""
    config = OmegaConf.load(ROOT / "configs" / "loss" / f"{name}.yaml")
    config = OmegaConf.merge(
        {"model": {"num_classes": CLASSES, "embedding_size": 8}, "seed": 3}, {"loss": config}
    )
    torch.manual_seed(4)
    config.loss.update(changes)
    made = instantiate(config.loss)
    return made


def images(num, seed):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num, 3, 2, 2, generator=generator),
        torch.arange(num) % CLASSES,
        torch.arange(num),
    )


class Given(L.LightningDataModule):
    """Trains on ``EACH`` images a rank; evaluates ``ITEMS``, in uneven parts."""

    def train_dataloader(self):
        batch = images(EACH * SIZE, seed=0)
        mine = TensorDataset(*(column[RANK * EACH : (RANK + 1) * EACH] for column in batch))
        return DataLoader(mine, batch_size=EACH, sampler=each_once(EACH, 0, 1))

    def val_dataloader(self):
        sets = [TensorDataset(*images(ITEMS, seed)) for seed in (1, 2, 3)]
        size = even_batch_size(ITEMS, SIZE, 4)
        sampler = each_once(ITEMS, RANK, SIZE)
        return [DataLoader(part, batch_size=size, sampler=sampler) for part in sets]

    # images of the classes, of others, and some that are only found
    test_dataloader = val_dataloader


def alone(model):
    """A copy that believes to be one process, and logs nothing."""
    one = copy.deepcopy(model)
    one.log = lambda *_, **__: None
    one._trainer = SimpleNamespace(world_size=1)
    return one


def after(model, steps, strategy="ring", ckpt_path=None, **options):
    run = trainer(strategy, max_steps=steps, max_epochs=steps, limit_val_batches=0, **options)
    run.fit(model, datamodule=Given(), ckpt_path=ckpt_path)
    return run


def in_one_process(model, steps):
    """A copy of ``model``, trained on the batch of all ranks."""
    one = alone(model)
    head, batch = one.sharded_head, images(EACH * SIZE, seed=0)
    if head is not None:
        head.join(None)
        head.set_optimizer(one.optimizer)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        one.training_step(batch, step).backward()
        optimizer.step()
        if head is not None:
            head.step(lr=0.5)
    return one


def check_gathered_losses_equal_one_process_on_the_whole_batch():
    for file in sorted((ROOT / "configs" / "loss").glob("*.yaml")):
        if file.stem == "sharded":
            continue
        model = recogniser(gather_embeddings=True, metric_loss=loss(file.stem))
        before, expected = parameters(model), parameters(in_one_process(model, steps=3))
        after(model, steps=3)
        found = parameters(model)
        assert_all_ranks_equal(found)
        assert (expected - before).norm() > 1e-3, file.stem  # there was something to learn
        assert_close(
            found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, of=file.stem: f"{of}: {text}"
        )


def check_memory_holds_the_images_of_all_ranks_and_survives_a_checkpoint(tmp_path):
    def fresh():
        return recogniser(
            gather_embeddings=True, metric_loss=loss("multi_similarity", memory=EACH * SIZE + 5)
        )

    model = fresh()
    expected = in_one_process(model, steps=4)
    after(model, steps=2).save_checkpoint(tmp_path / "memory.ckpt")
    model = fresh()
    after(model, steps=4, ckpt_path=tmp_path / "memory.ckpt")
    assert_close(parameters(model), parameters(expected), rtol=1e-4, atol=1e-5)
    mine, others = model.metric_loss.loss, expected.metric_loss.loss
    assert (mine.queue_idx, mine.has_been_filled) == (others.queue_idx, True)
    assert_close(mine.embedding_memory, others.embedding_memory, rtol=1e-4, atol=1e-5)


def check_sharded_head_trains_resumes_and_is_tested_as_in_one_process(tmp_path):
    def fresh():
        return recogniser(metric_loss=loss("sharded", margin="cosface", size=0.2, scale=8))

    one = in_one_process(fresh(), steps=4)
    after(fresh(), steps=2).save_checkpoint(tmp_path / "sharded.ckpt")
    for strategy in ("ring", "ring_sharded"):
        model = fresh()
        run = after(model, 4, strategy, ckpt_path=tmp_path / "sharded.ckpt")
        found = parameters(model)
        assert_all_ranks_equal(found)
        assert_close(found, parameters(one), rtol=1e-4, atol=1e-5)
        head = model.sharded_head
        assert len(head.weight) < CLASSES
        expected = one.sharded_head.weight[head.first : head.last]
        assert_close(head.weight, expected, rtol=1e-4, atol=1e-5)
    run.save_checkpoint(tmp_path / "end.ckpt")
    (metrics, *_) = trainer(RingStrategy()).test(model, datamodule=Given(), verbose=False)
    given, targets, _ = images(ITEMS, 1)
    with torch.no_grad():
        right = (one.sharded_head.predict(one.embedder(given)) == targets).double().mean()
    assert abs(metrics["test/accuracy"] - float(right)) < 1e-6
    whole = torch.load(tmp_path / "end.ckpt", weights_only=False)["sharded_head"]["weight"]
    assert_close(whole, one.sharded_head.weight.detach(), rtol=1e-4, atol=1e-5)


def check_strategies_under_which_the_loss_of_all_ranks_would_be_wrong_are_refused():
    sharded, gathering = recogniser(metric_loss=loss("sharded")), recogniser(gather_embeddings=True)
    remembering = recogniser(metric_loss=loss("supcon", memory=99))
    for model, strategy, options, message in (
        (sharded, ddp(), {}, "the strategy is DDPStrategy"),
        (sharded, RingStrategy(), {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 would clip"),
        (sharded, RingStrategy(uneven="join"), {}, "needs batches and gradients of all ranks"),
        (gathering, RingStrategy(algorithm=LocalSGD()), {}, "algorithms whose ranks step alone"),
        (remembering, RingStrategy(), {}, "of which all ranks get rank 0's"),
        (remembering, ddp(), {}, "of which all ranks get rank 0's"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            after(model, 1, strategy, **options)


def check_evaluation_counts_each_image_once():
    model = recogniser(classification_weight=1.0)
    tested = trainer(RingStrategy()).test(model, datamodule=Given(), verbose=False)
    metrics = {name: value for part in tested for name, value in part.items()}
    model.eval()
    found = {}
    for loader, name in enumerate(("test", "test_unseen", "training images")):
        pictures, labels, indices = images(ITEMS, loader + 1)
        with torch.no_grad():
            embeddings = model.embedder(pictures)
            right = (model.logits(embeddings).argmax(1) == labels).double()
        apart = labels + CLASSES * (name == "test_unseen"), indices + 1000 * loader
        found[name] = embeddings, *apart
        if name == "test":
            assert abs(metrics["test/accuracy"] - float(right.mean())) < 1e-6
    for name in ("test", "test_unseen"):
        union = tuple(torch.cat(column) for column in zip(*found.values(), strict=True))
        for gallery, expected in (
            ("", retrieval_metrics(*found[name])),
            ("_in_all", retrieval_metrics(*found[name], gallery=union)),
        ):
            assert expected.num_duplicates == 0
            for metric, value in expected.as_dict().items():
                logged = metrics[f"{name}{gallery}/{metric}"]
                assert abs(logged - value) < 1e-6, (name, gallery, metric, logged, value)
    assert "test_unseen/accuracy" not in metrics  # nothing was trained to name those classes
    assert not [name for name in metrics if "training" in name or "unseen_unseen" in name]
