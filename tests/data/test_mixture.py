"""Several sets as one: the shares of each, the same images on any number of ranks, and classes
joined by name.
"""

import numpy as np
import pytest

from lightning_ring.data import ImageFolder, Mixture, MixtureSampler, ShardDataset
from lightning_ring.data.packing.image import PackSettings
from tests.data.packing.packed import pack
from tests.images import write_folder
from tests.refusals import refused


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two sets with some classes in common, of 21 and 19 images."""
    root = tmp_path_factory.mktemp("sets")
    first = write_folder(root / "first")
    second = write_folder(root / "second")
    names = sorted(path.name for path in second.iterdir())
    (second / names[0]).rename(second / "a new class")
    next((second / names[1]).glob("*")).unlink()
    next((second / names[1]).glob("*")).unlink()
    pack(
        second,
        root / "shards",
        PackSettings(size=0, group_by_class=False),
    )
    return ImageFolder(first), ShardDataset(root / "shards")


def test_an_image_and_its_class_name_are_those_of_its_set(sets):
    mixture = Mixture(sets)
    assert mixture.sizes == [len(source) for source in sets]
    assert mixture.classes == [*sets[0].classes, "a new class"]
    for i in range(-len(mixture), len(mixture)):
        number, inside = mixture.place(i)
        source = sets[number]
        assert (number, inside) == (
            (0, i % len(mixture)) if i % len(mixture) < 21 else (1, i % len(mixture) - 21)
        )
        assert mixture.classes[mixture.labels[i]] == source.classes[source.labels[inside]]
        assert mixture.where(i) == source.where(inside)
    order = [39, 0, 30, 30, -1, 12]
    assert mixture.read_many(order) == [
        sets[mixture.place(i)[0]].read(mixture.place(i)[1]) for i in order
    ]
    with pytest.raises(IndexError):
        mixture.place(40)
    assert Mixture(sets).fingerprint == mixture.fingerprint != Mixture(sets[::-1]).fingerprint


@pytest.mark.parametrize("num_samples", [600, 100_000])
def test_each_set_gets_its_share_and_is_used_up_before_an_image_comes_again(num_samples):
    sizes, weights = [1000, 10, 300], np.array([5.0, 1.0, 2.0])
    sampler = MixtureSampler(sizes, weights.tolist(), num_samples=num_samples)
    taken = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        taken += list(sampler)
        drawn = np.bincount(
            np.searchsorted(np.cumsum(sizes), taken[-sampler.length :], side="right"), minlength=3
        )
        assert np.abs(drawn - sampler.length * weights / 8).max() < 1
    for start, size in ((0, 1000), (1000, 10), (1010, 300)):
        mine = [i for i in taken if start <= i < start + size]
        for first in range(0, len(mine) - size, size):
            assert sorted(mine[first : first + size]) == list(range(start, start + size))


def test_wrong_arguments_are_named(sets, tmp_path):
    class Unnamed:
        labels = np.zeros(3, dtype=np.int64)

        def __len__(self):
            return 3

    assert Mixture([Unnamed(), Unnamed()]).labels.tolist() == [0] * 6
    with refused("1 of 2 sets name their classes"):
        Mixture([sets[0], Unnamed()])
    with refused("one set or more"):
        Mixture([])
    for sizes, weights in (
        ([3, 4], [1]),
        ([3, 4], [1, 0]),
        ([3, 4], [1, -1]),
        ([3, 4], [1, float("nan")]),
    ):
        with refused(r"weights=\[.*expected 2 numbers above 0"):
            MixtureSampler(sizes, weights)
    with refused(r"sizes=\[3, 0\]"):
        MixtureSampler([3, 0], [1, 1])
    state = MixtureSampler([3, 4], [1, 1]).state_dict()
    MixtureSampler([3, 4], [2, 2]).load_state_dict(state)
    with refused("kind"):
        MixtureSampler([3, 4], [1, 2]).load_state_dict(state)
