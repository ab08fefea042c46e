"""The digits: their split, the batch of a rank, and evaluation that counts every image once."""

import hashlib
import itertools
from types import SimpleNamespace

import pytest
import sklearn.datasets
import torch

from recipes.batch_size import even_batch_size, per_rank_batch_size
from recipes.data.digits import Digits, load_digits
from recipes.data.tensors import each_once, stratified_split
from tests.refusals import refused


def build(batch_size=64, world_size=1, rank=0):
    data = Digits(batch_size)
    data.trainer = SimpleNamespace(world_size=world_size, global_rank=rank)
    data.setup("fit")
    return data


def test_parts_are_stratified_share_no_image_and_are_the_whole_set():
    images, labels = load_digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    datasets = build().datasets
    scans = [image.numpy().tobytes() for part in datasets.values() for image in part.tensors[0]]
    assert len(set(scans)) == len(scans) == 1797
    of_test = datasets["test"].tensors[1]
    for digit in range(10):
        assert abs((of_test == digit).sum() / (labels == digit).sum() - 0.2) < 0.005


def test_test_images_never_change():
    """A new split would make accuracies incomparable with every one that was published."""
    torch.manual_seed(1)
    test = stratified_split(load_digits()[1], 0.2, seed=0)[1]
    assert len(test) == 359
    assert hashlib.sha256(str(test.tolist()).encode()).hexdigest()[:16] == "816c645765dbf2ef"


@pytest.mark.parametrize(
    ("batch", "world", "hint"), [(64, 3, "63 or 66"), (2, 4, "to 4"), (0, 2, "to 2")]
)
def test_batch_that_does_not_divide_names_the_nearest(batch, world, hint):
    with refused(hint):
        per_rank_batch_size(batch, world)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_evaluation_takes_every_image_once(world_size):
    loaders = [build(420, world_size, rank).test_dataloader() for rank in range(world_size)]
    assert len({len(loader) for loader in loaders}) == 1
    seen = torch.cat([images for loader in loaders for images, _ in loader])
    everything = build().datasets["test"].tensors[0]
    assert sorted(seen.flatten(1).tolist()) == sorted(everything.flatten(1).tolist())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_have_equally_many_evaluation_batches(world_size):
    for num_samples, batch_size in itertools.product(range(4, 60), (1, 2, 5, 20)):
        size = even_batch_size(num_samples, world_size, batch_size)
        shares = [len(each_once(num_samples, rank, world_size)) for rank in range(world_size)]
        assert size >= batch_size
        assert sum(shares) == num_samples
        assert len({-(-share // size) for share in shares}) == 1


def test_missing_data_file_names_the_command(monkeypatch):
    def missing(**_):
        raise FileNotFoundError("digits.csv.gz")

    monkeypatch.setattr(sklearn.datasets, "load_digits", missing)
    with refused(r"digits.csv.gz.*pip install"):
        load_digits()
