"""Transforms of batches, and pictures that are not square."""

import pytest
import torch

from lightning_ring.data import CenterCrop, DeviceTransform, RandomResizedCrop
from lightning_ring.data.sampling.counters import Stream, integers
from tests.data.augment.loading import generators_untouched, images, make
from tests.refusals import refused

v2 = pytest.importorskip("torchvision.transforms.v2")


@pytest.mark.parametrize("mixing", [v2.MixUp(num_classes=3, alpha=0.4), v2.CutMix(num_classes=3)])
def test_torchvisions_mixing_by_the_seed_of_the_batch(folder, mixing):
    floats = {"transform": DeviceTransform()}
    with generators_untouched():
        got = list(make(folder, batch_transform=mixing, **floats))
    mixed = 0
    for step, (plain, (pictures, labels)) in enumerate(
        zip(make(folder, transform=DeviceTransform()), got, strict=True)
    ):
        [[seed]] = integers(3, Stream.BATCH, 0, [4 * step], 1).tolist()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            expected, soft = mixing(*plain)
        assert torch.equal(pictures, expected)
        assert torch.equal(labels, soft)
        assert not pictures.is_inference()
        mixed += not torch.equal(pictures, plain[0])
    assert mixed >= 4


def test_mixing_goes_on_after_a_resume_and_differs_between_ranks_and_epochs(folder):
    seen = []

    def note(pictures, labels):
        seen.append(float(torch.rand(())))
        return pictures, labels

    def drawn(rank, world_size, epoch, state=None):
        loader = make(folder, rank, world_size, batch_size=2, batch_transform=note)
        loader.sampler.set_epoch(epoch)
        if state is not None:
            loader.load_state_dict(state)
        seen.clear()
        list(loader)
        return seen.copy()

    begun = make(folder, 0, 3, batch_size=2)
    iterator = iter(begun)
    next(iterator)
    for rank in range(3):
        assert drawn(rank, 3, 0, begun.state_dict()) == drawn(rank, 3, 0)[1:]
    everything = [
        number for rank in range(3) for epoch in range(2) for number in drawn(rank, 3, epoch)
    ]
    assert len(set(everything)) == len(everything)
    del iterator


@pytest.mark.parametrize(
    ("transform", "found"),
    [
        (lambda pictures, labels: pictures, "a Tensor"),
        (lambda pictures, labels: (pictures[:1], labels), "1 and 4"),
        (lambda pictures, labels: None, "a NoneType"),
    ],
)
def test_a_batch_that_is_none_is_an_error(folder, transform, found):
    with refused(f"made {found} of 4 images and labels, expected"):
        list(make(folder, batch_transform=transform))


def test_kornia_on_the_batch(folder):
    kornia = pytest.importorskip("kornia.augmentation")
    mixing = kornia.RandomMixUpV2(data_keys=["input", "class"])
    changed = kornia.AugmentationSequential(kornia.RandomResizedCrop((16, 16)), data_keys=["input"])
    for transform in (mixing, lambda pictures, labels: (changed(pictures), labels)):
        given = {"transform": DeviceTransform(), "batch_transform": transform}
        first, again = list(make(folder, **given)), list(make(folder, **given))
        for (pictures, labels), (others, other_labels) in zip(first, again, strict=True):
            assert torch.equal(pictures, others)
            assert torch.equal(labels, other_labels)


def test_several_crops_are_an_error(folder):
    with refused("expected one crop"):
        make(folder, crop=[RandomResizedCrop(32)] * 2)


def test_height_and_width_may_differ(folder):
    for crop in (RandomResizedCrop((24, 40)), CenterCrop((24, 40), 48)):
        given = {"transform": DeviceTransform(contrast=0.2), "sample_transform": v2.RandAugment()}
        loader = make(folder, crop=crop, **given)
        assert images(loader).shape == (21, 3, 24, 40)
    with refused(r"cannot cut \(24, 50\) pixels"):
        CenterCrop((24, 50), 48)
