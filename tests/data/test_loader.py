"""The loader: the same batches on any number of threads, resumed anywhere, and nothing left
running.
"""

import threading
import time

import numpy as np
import pytest
import torch

from lightning_ring.data import (
    BalancedSampler,
    DeviceTransform,
    ImageFolder,
    PKSampler,
    RandomResizedCrop,
    ShuffledSampler,
    image_loader,
    item_loader,
)
from lightning_ring.errors import SampleError
from tests.gpu import on_gpu
from tests.images import write_folder
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _no_thread_stays():
    yield
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith("ring-loader")
    ] == []


def make(folder, rank=0, world_size=1, batch_size=4, **kwargs):
    sampler = kwargs.pop("sampler", None) or ShuffledSampler(
        len(folder), rank=rank, world_size=world_size
    )
    transform = kwargs.pop("transform", None)
    return image_loader(
        folder,
        sampler,
        batch_size,
        crop=RandomResizedCrop(16),
        transform=transform,
        with_indices=True,
        **kwargs,
    )


def batches(loader):
    return [[part.clone() for part in batch] for batch in loader]


def assert_same(some, others):
    assert len(some) == len(others) > 0
    for one, other in zip(some, others, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_batches_hold_the_images_and_labels_of_the_order(folder):
    loader = make(folder, num_threads=2)
    got = batches(loader)
    assert len(got) == len(loader) == 6
    assert [len(batch[0]) for batch in got] == [4, 4, 4, 4, 4, 1]
    indices = torch.cat([batch[2] for batch in got])
    assert indices.tolist() == list(loader.sampler)
    assert torch.equal(
        torch.cat([batch[1] for batch in got]), torch.from_numpy(folder.labels[indices]).long()
    )
    assert got[0][0].shape == (4, 3, 16, 16)
    assert got[0][0].dtype == torch.uint8


@pytest.mark.parametrize(
    "transform", [None, DeviceTransform(brightness=0.4, contrast=0.4, saturation=0.4)]
)
def test_threads_and_prefetching_change_nothing(folder, transform):
    expected = batches(make(folder, num_threads=1, prefetch=1, transform=transform))
    assert_same(batches(make(folder, num_threads=3, prefetch=4, transform=transform)), expected)


@pytest.mark.parametrize(
    "transform", [None, DeviceTransform(), DeviceTransform(dtype=torch.bfloat16)]
)
def test_buffers_are_filled_anew_when_nobody_holds_them(folder, transform):
    def pages(loader):
        return {batch[0].data_ptr() for batch in loader}

    loader = make(folder, transform=transform, num_threads=1, prefetch=1)
    # of 12 batches: one held by the loop, one being filled, one spare
    assert len(pages(loader) | pages(loader)) <= 3
    pieces = [batch[0][-1] for batch in loader]  # a piece holds the whole
    arrays = [batch[0].permute(0, 2, 3, 1).view(torch.uint8).numpy() for batch in loader]
    expected = [batch[0] for batch in batches(make(folder, transform=transform))]
    batches(loader)
    for piece, array, images in zip(pieces, arrays, expected, strict=True):
        assert torch.equal(piece, images[-1])
        assert np.array_equal(array, images.permute(0, 2, 3, 1).view(torch.uint8).numpy())


def test_it_resumes_at_the_next_sample_on_another_number_of_ranks(folder):
    whole = torch.cat([batch[0] for batch in batches(make(folder))])
    loader = make(folder, 1, 3, batch_size=2, num_threads=2, prefetch=3)
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    assert state == make_after(folder, 0, 3, 2).state_dict()
    del iterator
    resumed = make(folder, batch_size=3)
    resumed.load_state_dict(state)
    assert len(resumed) == 2 + 3
    rest = batches(resumed)
    assert torch.equal(torch.cat([batch[0] for batch in rest]), whole[12:])
    assert len(resumed) == 7  # the next time through is whole again
    assert resumed.state_dict()["sampler"]["position"] == 21


def make_after(folder, rank, world_size, num):
    loader = make(folder, rank, world_size, batch_size=2)
    for _, _ in zip(range(num), loader, strict=False):
        pass
    return loader


def test_its_state_counts_the_ranks_with_which_the_iteration_began():
    """As when a rank has died, and a checkpoint is saved before the loader begins again with the
    others.
    """
    sampler = ShuffledSampler(100)
    loader = item_loader(range(100), sampler, 4)
    with sampler.placed(1, 3):
        iterator = iter(loader)
        next(iterator), next(iterator)
    with sampler.placed(0, 2):
        state = loader.state_dict()
    iterator.close()
    assert state["sampler"]["position"] == 2 * 4 * 3


def test_a_batch_that_was_fetched_but_not_trained_on_comes_again(folder):
    loader = make(folder)
    iterator = iter(loader)
    got = [next(iterator) for _ in range(3)]
    state = loader.trained_state(1)
    resumed = make(folder)
    resumed.load_state_dict(state)
    again = iter(resumed)
    assert torch.equal(next(again)[0], got[2][0])
    assert resumed.trained_state(1) == state
    del iterator, again


def test_the_epoch_is_looked_at_with_the_first_batch(folder):
    loader = make(folder)
    iterator = iter(loader)  # Lightning calls it before set_epoch
    loader.sampler.set_epoch(3)
    first = next(iterator)
    assert first[2].tolist() == list(loader.sampler)[:4]
    assert loader.state_dict()["sampler"]["epoch"] == 3
    loader.sampler.set_epoch(4)
    assert loader.state_dict() == {
        "sampler": loader.sampler.state_dict(),
        "batches": 0,
        "images": folder.fingerprint,
    }
    del iterator


def test_a_broken_image_is_named_where_its_batch_would_come(tmp_path):
    root = write_folder(tmp_path, classes=1, images=6)
    (root / "c0" / "3.jpg").write_bytes((root / "c0" / "3.jpg").read_bytes()[:700])
    folder = ImageFolder(root)
    in_order = ShuffledSampler(6, shuffle=False)
    iterator = iter(make(folder, sampler=in_order, batch_size=2))
    assert next(iterator)[2].tolist() == [0, 1]
    with pytest.raises(SampleError, match=r"c0/3.jpg: cannot be decoded: .*Repair or remove it"):
        next(iterator)
    assert not any(thread.name.startswith("ring-loader") for thread in threading.enumerate())
    (root / "c0" / "4.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"c0/4.jpg"):
        list(make(folder, sampler=in_order, batch_size=5))


@pytest.mark.parametrize("how", ["break", "close", "error"])
def test_threads_end_with_the_iteration(folder, how):
    loader = make(folder, batch_size=1, num_threads=2, prefetch=8)
    iterator = iter(loader)
    assert len(next(iterator)) == 3
    assert any(thread.name.startswith("ring-loader") for thread in threading.enumerate())
    if how == "close":
        iterator.close()
    elif how == "error":
        with pytest.raises(KeyError):
            raise_within(iterator)
    del iterator


def raise_within(iterator):
    for _ in iterator:
        raise KeyError("in training")


def test_a_sampler_that_knows_its_batch_size(folder):
    sampler = PKSampler(folder.labels, 2, 3)
    loader = image_loader(folder, sampler, crop=RandomResizedCrop(16), transform=None)
    labels = [batch[1].view(2, 3) for batch in loader]
    # 21 images make two passes of three classes: a step of two in each
    assert len(labels) == len(loader) == 2
    assert all((group == group[0]).all() for batch in labels for group in batch)
    with refused("batch_size=5 was given with PKSampler, expected 6"):
        image_loader(folder, sampler, 5, crop=RandomResizedCrop(16), transform=None)
    with refused("expected a number"):
        image_loader(
            folder, BalancedSampler(folder.labels), crop=RandomResizedCrop(16), transform=None
        )
    with refused("prefetch=0"):
        make(folder, prefetch=0)


def test_times_add_up(folder):
    loader = make(folder, transform=DeviceTransform())
    list(loader)
    spent = loader.times
    assert (spent.batches, spent.samples) == (6, 21)
    assert min(spent.reading, spent.transforming, spent.waiting, spent.copying) > 0
    assert spent.collating == 0
    reading, decoding, handing_over = loader.cost()
    assert reading == loader.times.reading / 6
    assert decoding == loader.times.transforming / 6
    assert handing_over >= loader.times.copying / 6


class Items:
    """A torch data set that is slow by turns, so that threads finish out of order."""

    def __init__(self, num, broken=-1):
        self.num = num
        self.broken = broken

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        if i == self.broken:
            raise KeyError(f"no row {i}")
        time.sleep(0.002 * (i % 3))
        return {"index": i, "square": torch.tensor(i * i)}


def test_any_torch_data_set():
    sampler = ShuffledSampler(21)
    loader = item_loader(Items(21), sampler, 4, num_threads=3)
    got = list(loader)
    assert torch.cat([batch["index"] for batch in got]).tolist() == list(sampler)
    assert torch.equal(
        torch.cat([batch["square"] for batch in got]), torch.tensor([i * i for i in sampler])
    )
    assert loader.times.transforming > 0 < loader.times.collating
    with pytest.raises(
        SampleError, match=r"sample 7 of Items cannot be had: KeyError\('no row 7'\)"
    ):
        list(item_loader(Items(21, broken=7), sampler, 4))


def test_collate_functions_and_batched_data_sets():
    class Batched(Items):
        def __getitems__(self, indices):
            return [-i for i in indices]

    sampler = ShuffledSampler(6, shuffle=False)
    assert list(item_loader(Batched(6), sampler, 4, collate=sum)) == [-6, -9]
    with pytest.raises(SampleError, match="make no batch"):
        list(item_loader(Items(6), sampler, 4, collate=sum))


@on_gpu
def test_batches_on_the_gpu_equal_those_on_the_cpu(folder):
    for transform in (None, DeviceTransform(brightness=0.4, contrast=0.4, saturation=0.4)):
        expected = batches(make(folder, transform=transform))
        got = []
        for batch in make(folder, transform=transform, device="cuda", num_threads=2, prefetch=3):
            torch.cuda.current_stream().synchronize()
            assert all(part.is_cuda for part in batch)
            got.append([part.cpu() for part in batch])
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one[0], other[0], atol=1e-4, rtol=1e-4)
            assert torch.equal(one[1], other[1])
            assert torch.equal(one[2], other[2])
