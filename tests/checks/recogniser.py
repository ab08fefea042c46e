"""Checks of the recogniser on real ranks: against one process on the whole batch."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ring import RingStrategy
from lightning_ring.retrieval import retrieval_metrics
from recipes.data.exact import ExactSampler, even_batch_size
from recipes.recogniser import Recogniser
from tests.checks.models import RANK, SIZE, assert_all_ranks_equal, parameters, trainer

ITEMS, CLASSES, EACH = 26, 5, 6


def recogniser(**options: Any) -> Recogniser:
    """Without BatchNorm in the embedder, so that a rank's part of a batch is treated as in the whole batch."""
    torch.manual_seed(3)
    embedder = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
    options = {"classification_weight": 0.0, "triplet_weight": 1.0, "margin": 1.0, **options}
    return Recogniser(embedder, 8, CLASSES, partial(torch.optim.SGD, lr=0.5), **options)


def images(num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, 3, 2, 2, generator=generator), torch.arange(num) % CLASSES, torch.arange(num)


class Given(L.LightningDataModule):
    """Trains on ``EACH`` images a rank; evaluates ``ITEMS``, in uneven parts."""

    class_counts = [9, 2, 8, 7, 1]  # noqa: RUF012

    def train_dataloader(self) -> DataLoader:
        batch = images(EACH * SIZE, seed=0)
        mine = TensorDataset(*(column[RANK * EACH : (RANK + 1) * EACH] for column in batch))
        return DataLoader(mine, batch_size=EACH, sampler=ExactSampler(mine, 1, 0))

    def val_dataloader(self) -> list[DataLoader]:
        sets = [TensorDataset(*images(ITEMS, seed)) for seed in (1, 2)]
        size = even_batch_size(ITEMS, SIZE, 4)
        return [DataLoader(part, batch_size=size, sampler=ExactSampler(part, SIZE, RANK)) for part in sets]

    test_dataloader = val_dataloader


class NoPair(Given):
    """No class has two of the images that are evaluated."""

    def val_dataloader(self) -> DataLoader:
        part = TensorDataset(*images(CLASSES, 1))
        return DataLoader(part, even_batch_size(CLASSES, SIZE, 1), sampler=ExactSampler(part, SIZE, RANK))

    test_dataloader = val_dataloader  # type: ignore[assignment]


def alone(model: Recogniser) -> Recogniser:
    """A copy that believes to be one process, and logs nothing."""
    one = copy.deepcopy(model)
    one.log = lambda *_, **__: None  # type: ignore[method-assign]
    one._trainer = SimpleNamespace(world_size=1)  # type: ignore[assignment]
    return one


def after_one_step(model: Recogniser) -> Recogniser:
    trainer(RingStrategy(), max_steps=1, max_epochs=1, limit_val_batches=0).fit(model, datamodule=Given())
    return model


def check_gathered_triplets_equal_one_process_on_the_whole_batch() -> None:
    model = recogniser(gather_embeddings=True)
    one = alone(model)
    one.triplets(one.embedder(images(EACH * SIZE, 0)[0]), images(EACH * SIZE, 0)[1]).backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in one.embedder.parameters()]).double()
    found = parameters(after_one_step(model).embedder)
    assert_all_ranks_equal(found)
    assert (expected - parameters(one.embedder)).norm() > 1e-3  # there was something to learn
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def check_own_triplets_look_at_a_ranks_own_images() -> None:
    model = recogniser()
    one, batch, loss = alone(model), images(EACH * SIZE, 0), torch.zeros(())
    for rank in range(SIZE):
        part = slice(rank * EACH, (rank + 1) * EACH)
        loss = loss + one.triplets(one.embedder(batch[0][part]), batch[1][part]) / SIZE
    loss.backward()
    expected = torch.cat([(p - 0.5 * p.grad).detach().flatten() for p in one.embedder.parameters()]).double()
    torch.testing.assert_close(parameters(after_one_step(model).embedder), expected, rtol=1e-5, atol=1e-6)


def check_evaluation_counts_each_image_once_and_knows_the_rare_classes() -> None:
    model = recogniser(classification_weight=1.0)
    run = trainer(RingStrategy())
    tested = run.test(model, datamodule=Given(), verbose=False)
    metrics = {name: value for part in tested for name, value in part.items()}
    model.eval()
    for seed, name in ((1, "test"), (2, "test_unseen")):
        pictures, labels, indices = images(ITEMS, seed)
        with torch.no_grad():
            embeddings = model.embedder(pictures)
            right = (model.logits(embeddings).argmax(1) == labels).double()
        expected = retrieval_metrics(embeddings, labels, indices)
        assert expected.num_duplicates == 0
        for metric, value in expected.as_dict().items():
            assert abs(metrics[f"{name}/{metric}"] - value) < 1e-6, (name, metric)
        if name == "test":
            rare = torch.isin(labels, torch.tensor([4]))  # the third of five classes with the fewest images
            assert abs(metrics["test/accuracy"] - float(right.mean())) < 1e-6
            assert abs(metrics["test/accuracy_rare"] - float(right[rare].mean())) < 1e-6
    assert "test_unseen/accuracy" not in metrics  # nothing was trained to name those classes


def check_without_two_images_of_a_class_retrieval_is_left_out_with_a_warning() -> None:
    model = recogniser(classification_weight=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (metrics,) = trainer(RingStrategy()).test(model, datamodule=NoPair(), verbose=False)
    left_out = [str(one.message) for one in caught if "left out of this evaluation" in str(one.message)]
    assert len(left_out) == (RANK == 0)
    assert not [name for name in metrics if "R@" in name]
    assert "test/accuracy" in metrics, "the head is judged all the same"
    with warnings.catch_warnings(record=True) as caught:  # a few batches before training need not have a pair
        warnings.simplefilter("always")
        run = trainer(RingStrategy(), max_steps=1, num_sanity_val_steps=1, check_val_every_n_epoch=9)
        run.fit(model, train_dataloaders=Given().train_dataloader(), val_dataloaders=NoPair().val_dataloader())
    assert run.global_step == 1
    assert not [one for one in caught if "left out of this evaluation" in str(one.message)]
