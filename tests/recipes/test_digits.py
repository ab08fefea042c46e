"""The digits: their split, the batch of a rank, and evaluation that counts every image once."""

from __future__ import annotations

import hashlib
import itertools
from types import SimpleNamespace

import pytest
import sklearn.datasets
import torch

from lightning_ring.errors import ConfigurationError
from recipes.batch_size import per_rank_batch_size
from recipes.data.digits import Digits
from recipes.data.exact import ExactSampler, even_batch_size
from recipes.data.scans import load_digits
from recipes.data.split import stratified_split


def build(batch_size: int = 64, world_size: int = 1, rank: int = 0) -> Digits:
    data = Digits(batch_size)
    data.trainer = SimpleNamespace(world_size=world_size, global_rank=rank)
    data.setup("fit")
    return data


def test_images_are_the_whole_set():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert labels.unique().tolist() == list(range(10))


def test_split_is_a_partition_and_stratified():
    labels = load_digits()[1]
    rest, fifth = stratified_split(labels, 0.2, seed=0)
    assert torch.equal(torch.cat([rest, fifth]).sort().values, torch.arange(1797))
    for digit in range(10):
        share = (labels[fifth] == digit).sum() / (labels == digit).sum()
        assert abs(share - 0.2) < 0.005


def test_split_depends_on_its_own_seed_only():
    labels = load_digits()[1]
    torch.manual_seed(1)
    first = stratified_split(labels, 0.2, seed=0)[1]
    torch.manual_seed(2)
    assert torch.equal(first, stratified_split(labels, 0.2, seed=0)[1])
    assert not torch.equal(first, stratified_split(labels, 0.2, seed=1)[1])


def test_test_images_never_change():
    """A new split would make accuracies incomparable with every one that was published."""
    test = stratified_split(load_digits()[1], 0.2, seed=0)[1]
    assert len(test) == 359
    assert hashlib.sha256(str(test.tolist()).encode()).hexdigest()[:16] == "816c645765dbf2ef"


def test_parts_share_no_image():
    data = build()
    sizes = {name: len(dataset) for name, dataset in data.datasets.items()}
    assert sum(sizes.values()) == 1797
    assert sizes["test"] == 359
    scans = [
        image.numpy().tobytes()
        for dataset in data.datasets.values()
        for image in dataset.tensors[0]
    ]
    assert len(set(scans)) == 1797


@pytest.mark.parametrize(
    ("batch", "world", "expected"), [(64, 1, 64), (64, 2, 32), (63, 3, 21), (4, 4, 1)]
)
def test_batch_of_a_rank(batch, world, expected):
    assert per_rank_batch_size(batch, world) == expected
    loader = build(batch, world).train_dataloader()
    assert len(next(iter(loader))[0]) == expected


@pytest.mark.parametrize(
    ("batch", "world", "hint"), [(64, 3, "63 or 66"), (2, 4, "to 4"), (0, 2, "to 2")]
)
def test_batch_that_does_not_divide_names_the_nearest(batch, world, hint):
    with pytest.raises(ConfigurationError, match=hint):
        per_rank_batch_size(batch, world)


def test_batch_larger_than_the_set_is_refused():
    with pytest.raises(ConfigurationError, match="no step"):
        build(batch_size=2048).train_dataloader()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_evaluation_takes_every_image_once(world_size):
    loaders = [build(420, world_size, rank).test_dataloader() for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    seen = torch.cat([images for loader in loaders for images, _ in loader])
    everything = build().datasets["test"].tensors[0]
    assert sorted(map(str, seen.flatten(1).tolist())) == sorted(
        map(str, everything.flatten(1).tolist())
    )


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_have_equally_many_evaluation_batches(world_size):
    for num_samples, batch_size in itertools.product(range(4, 60), (1, 2, 5, 20)):
        size = even_batch_size(num_samples, world_size, batch_size)
        shares = [
            len(ExactSampler(range(num_samples), world_size, rank)) for rank in range(world_size)
        ]
        assert size >= batch_size
        assert (
            sum(shares) == num_samples == ExactSampler(range(num_samples), world_size, 0).total_size
        )
        assert len({-(-share // size) for share in shares}) == 1


def test_fewer_images_than_ranks_are_refused():
    with pytest.raises(ConfigurationError, match="3 images cannot be evaluated on 4 ranks"):
        ExactSampler(range(3), 4, 0)


def test_missing_data_file_names_folder_and_command(monkeypatch):
    def missing(**_):
        raise FileNotFoundError("digits.csv.gz")

    monkeypatch.setattr(sklearn.datasets, "load_digits", missing)
    with pytest.raises(ConfigurationError, match=r"sklearn/datasets/data .*pip install"):
        load_digits()
