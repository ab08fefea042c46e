"""Images that cannot be read: replaced, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ring.data import (
    ImageFolder,
    RandomResizedCrop,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.packing.run import pack
from lightning_ring.errors import ConfigurationError, SampleError, ShardError, ShardLostError
from tests.images import write_folder


def test_images_that_cannot_be_read_are_replaced_without_disturbing_the_others(
    tmp_path: Path, caplog: Any
) -> None:
    root = write_folder(tmp_path / "src", classes=3, images=8)
    pack(root, tmp_path / "dst", PackSettings(size=0), 1, lambda *numbers: None)
    bad = 5
    places = ShardDataset(tmp_path / "dst")._index
    with open(tmp_path / "dst" / "shard-000000.tar", "r+b") as file:
        file.seek(places.place(bad).offset + 700)
        file.write(b"damaged")
    shards = ShardDataset(tmp_path / "dst")

    def taken(rank: int, world_size: int, skip: bool = True) -> Any:
        sampler = ShuffledSampler(len(shards), rank=rank, world_size=world_size)
        loader = image_loader(
            shards,
            sampler,
            3,
            crop=RandomResizedCrop(16),
            transform=None,
            with_indices=True,
            on_error="skip" if skip else "raise",
        )
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
            assert list(loader.maker.skipped.reasons) == [bad] * len(replaced)
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
    with pytest.raises(ConfigurationError, match="expected 'raise', 'skip' or 'skip_shards'"):
        image_loader(
            shards,
            ShuffledSampler(24),
            3,
            crop=RandomResizedCrop(16),
            transform=None,
            on_error="drop",
        )


def lose_shard(path: Path, how: str) -> None:
    """After it was opened: its length was right then."""
    if how == "is cut short":
        path.write_bytes(path.read_bytes()[:1000])
        return
    path.unlink()
    if how == "cannot be opened":
        path.symlink_to(path)


@pytest.mark.parametrize("how", ["is gone", "is cut short", "cannot be opened"])
def test_a_lost_shard_is_an_error_unless_its_images_may_be_skipped_too(
    tmp_path: Path, how: str
) -> None:
    root = write_folder(tmp_path / "src", classes=2, images=12)
    pack(root, tmp_path / "dst", PackSettings(size=0, shard_mb=16 / 1024), 1, lambda *numbers: None)
    shards = ShardDataset(tmp_path / "dst", decode=False)
    lost = {i for i in range(len(shards)) if shards._index.place(i).shard == 1}
    assert 1 < len(lost) < len(shards) / 2
    lose_shard(path := tmp_path / "dst" / "shard-000001.tar", how)

    def taken(on_error: Any) -> list[int]:
        sampler = ShuffledSampler(len(shards), rank=0, world_size=1)
        crop = RandomResizedCrop(16)
        loader = image_loader(
            shards, sampler, 4, crop=crop, transform=None, with_indices=True, on_error=on_error
        )
        return [int(i) for *_, indices in loader for i in indices]

    for on_error in ("raise", "skip"):
        with pytest.raises(ShardLostError, match=f"{path} {how}"):
            taken(on_error)
    got = taken("skip_shards")
    assert len(got) == len(shards)
    assert set(got) == set(range(len(shards))) - (
        lost if how != "is cut short" else lost - set(got)
    )


def test_a_source_of_which_nothing_can_be_read_is_an_error(tmp_path: Path) -> None:
    folder = ImageFolder(write_folder(tmp_path, classes=2, images=3))
    for path in tmp_path.glob("*/*.jpg"):
        path.write_bytes(b"no")
    sampler = ShuffledSampler(6, rank=0, world_size=1)
    loader = image_loader(
        folder, sampler, 3, crop=RandomResizedCrop(16), transform=None, on_error="skip"
    )
    with pytest.raises(SampleError, match=r"nor can any of 7 images in its place"):
        next(iter(loader))
