"""Images that cannot be read: replaced, or an error."""

import zlib
from io import BytesIO

import pytest
import torch
from PIL import Image

from lightning_ring.data import (
    ImageFolder,
    RandomResizedCrop,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.loading.transforms import _MOST_KEPT, _Scratch
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.errors import ConfigurationError, SampleError, ShardError, ShardLostError
from tests.data.packing.packed import pack
from tests.images import write_folder


def make(source, sampler, on_error):
    crop, images = RandomResizedCrop(16), {"transform": None, "with_indices": True}
    return image_loader(source, sampler, 3, crop=crop, on_error=on_error, **images)


def test_images_that_cannot_be_read_are_replaced_without_disturbing_the_others(tmp_path, caplog):
    root = write_folder(tmp_path / "src", classes=3, images=8)
    pack(root, tmp_path / "dst", PackSettings(size=0))
    bad = 5
    places = ShardDataset(tmp_path / "dst")._index
    with open(tmp_path / "dst" / "shard-000000.tar", "r+b") as file:
        file.seek(places.place(bad).offset + 700)
        file.write(b"damaged")
    shards = ShardDataset(tmp_path / "dst")

    def taken(rank, world_size, skip=True):
        sampler = ShuffledSampler(len(shards), rank=rank, world_size=world_size)
        loader = make(shards, sampler, "skip" if skip else "raise")
        got = [
            (int(i), int(label), image)
            for images, *rest in loader
            for image, label, i in zip(images, *rest, strict=True)
        ]
        return got, [*sampler], loader

    for world_size in (1, 2):
        for rank in range(world_size):
            caplog.clear()
            got, order, loader = taken(rank, world_size)
            replaced = [place for place, index in enumerate(order) if index == bad]
            assert loader.times.skipped == len(replaced) == caplog.text.count(f"image {bad} (")
            assert list(loader.maker.skipped) == [bad] * len(replaced)
            for place, (index, label, _) in enumerate(got):
                assert (index == order[place]) == (place not in replaced)
                assert label == shards.labels[order[place]]  # the replacement is of the same class
    (whole, order, _), halves = taken(0, 1), [taken(rank, 2)[0] for rank in range(2)]
    for place, sample in enumerate(whole):  # the same replacement and pixels on any number of ranks
        other = halves[place % 2][place // 2]
        assert sample[:2] == other[:2]
        assert torch.equal(sample[2], other[2])
    with pytest.raises(ShardError, match=rf"image {bad} \(.*CRC-32"):
        taken(0, 1, skip=False)
    with pytest.raises(ConfigurationError, match="expected 'raise' or 'skip'"):
        make(shards, ShuffledSampler(24), "drop")


def lose_shard(path, how):
    """After it was opened: its length was right then."""
    if how == "is cut short":
        path.write_bytes(path.read_bytes()[:1000])
        return
    path.unlink()
    if how == "cannot be opened":
        path.symlink_to(path)


@pytest.mark.parametrize("how", ["is gone", "is cut short", "cannot be opened"])
def test_a_lost_shard_is_an_error(tmp_path, how):
    root = write_folder(tmp_path / "src", classes=2, images=12)
    pack(root, tmp_path / "dst", PackSettings(size=0, shard_mb=16 / 1024))
    shards = ShardDataset(tmp_path / "dst", decode=False)
    lose_shard(path := tmp_path / "dst" / "shard-000001.tar", how)
    said = how if how == "is cut short" else "cannot be read"
    for on_error in ("raise", "skip"):
        loader = make(shards, ShuffledSampler(len(shards)), on_error)
        with pytest.raises(ShardLostError, match=f"{path} {said}"):
            list(loader)


def test_a_source_of_which_nothing_can_be_read_is_an_error(tmp_path):
    folder = ImageFolder(write_folder(tmp_path, classes=2, images=3))
    for path in tmp_path.glob("*/*.jpg"):
        path.write_bytes(b"no")
    loader = make(folder, ShuffledSampler(6), "skip")
    with pytest.raises(SampleError, match=r"nor can any image in its place"):
        next(iter(loader))


def says(width, height, kind):
    """A small image whose header says that it is ``width`` x ``height``."""
    data = BytesIO()
    Image.new("RGB", (16, 16)).save(data, kind)
    whole = bytearray(data.getvalue())
    if kind == "JPEG":
        at = whole.index(b"\xff\xc0") + 5
        whole[at : at + 4] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
        return bytes(whole)
    whole[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    whole[29:33] = zlib.crc32(whole[12:29]).to_bytes(4, "big")
    return bytes(whole)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("side", [65_500, 14_000])  # Pillow refuses the first by itself
def test_a_header_that_says_too_many_pixels_is_damage(tmp_path, kind, side):
    write_folder(tmp_path, classes=2, images=3)
    bad = tmp_path / "c0" / "1.jpg"
    bad.write_bytes(says(side, side, kind))
    folder, sampler = ImageFolder(tmp_path), ShuffledSampler(6)
    with pytest.raises(SampleError, match=r"1\.jpg: cannot be decoded.*(pixels|bomb)"):
        list(make(folder, sampler, "raise"))
    loader = make(folder, sampler, "skip")
    assert sum(len(images) for images, *_ in loader) == 6
    assert list(loader.maker.skipped) == [1]


def test_an_image_of_too_many_pixels_is_damaged(tmp_path, monkeypatch):
    write_folder(tmp_path, classes=1, images=2, size=(48, 64))
    sampler, crop = ShuffledSampler(2), RandomResizedCrop(16)
    assert (
        len(list(image_loader(ImageFolder(tmp_path), sampler, 2, crop=crop, transform=None))) == 1
    )
    for module in ("decoding", "loading.transforms"):
        monkeypatch.setattr(f"lightning_ring.data.{module}.MAX_PIXELS", 48 * 64 - 1)
    with pytest.raises(SampleError, match="64 x 48 pixels, expected at most 3,071"):
        list(image_loader(ImageFolder(tmp_path), sampler, 2, crop=crop, transform=None))


def test_memory_that_a_large_image_was_decoded_into_is_not_kept():
    scratch = _Scratch()
    kept = scratch.room(3000)
    assert len(scratch.room(_MOST_KEPT + 1)) > _MOST_KEPT
    assert scratch.room(3000) is kept
