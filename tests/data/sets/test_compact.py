"""Shards with deleted images, written anew without them."""

from __future__ import annotations

import tarfile

import numpy as np
import pytest

from lightning_ring.cli.main import main
from lightning_ring.data import ShardDataset
from lightning_ring.data.sets.change import annotate_images, delete_images, relabel_images
from lightning_ring.data.sets.compact import compact_set
from lightning_ring.data.sets.prune import prune_set
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.data.shards.verify import verify
from lightning_ring.errors import ShardError
from tests.data.photos import encode, photo
from tests.data.sets.daily import draw, files_of, images_of, pack

NAMES = {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("bird", "cat", "horse") for i in range(9)}


@pytest.fixture
def target(tmp_path):
    source = draw(tmp_path / "src", NAMES)
    (source / "cat" / "x.png").write_bytes(encode(photo(77, 30, 30), "PNG"))
    pack(source, tmp_path / "dst")
    annotate_images(tmp_path / "dst", {"width": {name: i for i, name in enumerate(NAMES)}})
    return tmp_path / "dst"


def members(root):
    """Names and bytes in the tars of the newest generation."""
    found = {}
    for shard in read_manifest(root).shards:
        with tarfile.open(root / shard.name) as tar:
            found |= {member.name: tar.extractfile(member).read() for member in tar}
    return found


def test_images_stay_as_they_are_and_deleted_ones_are_gone(target):
    gone = np.random.default_rng(0).choice(sorted(NAMES), 12, replace=False).tolist()
    lost = [images_of(target)[name][1] for name in gone]
    delete_images(target, names=gone)
    relabel_images(target, where="class_name == 'horse'", to="pony", new_classes=True)
    before = ShardDataset(target, decode=False)
    kept = [(before.name(i), before[i], before.metadata["width"][i]) for i in range(len(before))]
    old_files = files_of(target)
    compacted = compact_set(target)
    now = ShardDataset(target, decode=False)
    assert str([(now.name(i), now[i], now.metadata["width"][i]) for i in range(len(now))]) == str(kept)
    assert all(files_of(target)[name] == data for name, data in old_files.items() if name != "manifest.json")
    assert verify(target, 1, lambda *numbers: None) == []
    assert [shard.deleted for shard in compacted.shards] == [0] * len(compacted.shards)
    assert max(shard.bytes for shard in compacted.shards) <= 16 * 1024

    inside = members(target)
    assert not set(inside.values()) & set(lost)
    assert sum(name.endswith((".jpg", ".png")) for name in inside) == len(kept)
    assert sum(name.endswith(".png") for name in inside) == 1
    for i in range(len(now)):
        (data,) = [inside[now.key(i) + end] for end in (".jpg", ".png") if now.key(i) + end in inside]
        assert (data, inside[now.key(i) + ".cls"]) == (now.read(i), str(now.labels[i]).encode())

    size = sum(path.stat().st_size for path in target.glob("*.tar"))
    pruned = prune_set(target)
    assert sum(path.stat().st_size for path in target.glob("*.tar")) == size - pruned.bytes < size
    assert images_of(target).keys() == {name for name, *_ in kept}
    assert verify(target, 1, lambda *numbers: None) == []
    assert compact_set(target).generation == compacted.generation  # nothing to do
    relabel_images(target, where="class_name == 'pony'", to="horse")
    assert pack(target.parent / "src", target).counts["added"] == 0  # deleted images stay deleted
    again = pack(target.parent / "src", target, restore=True)
    assert again.counts["added"] == 12
    assert len(members(target)) == 2 * again.samples  # new keys are new
    assert verify(target, 1, lambda *numbers: None) == []


def test_shards_without_deleted_images_stay_and_neighbours_become_one(target):
    before = read_manifest(target)
    dataset = ShardDataset(target)
    of_shard = [dataset._index.place(i).shard for i in range(len(dataset))]
    first_left = [of_shard.index(number) for number in (1, 2)]
    delete_images(
        target, names=[dataset.name(i) for i in range(len(dataset)) if of_shard[i] in (1, 2) and i not in first_left]
    )
    compacted = compact_set(target)
    assert [shard for shard in compacted.shards if shard in before.shards] == [before.shards[0], *before.shards[3:]]
    assert len(compacted.shards) == len(before.shards) - 1
    assert [ShardDataset(target).name(i) for i in range(len(compacted.shards))]


def test_a_damaged_image_is_not_copied(target):
    delete_images(target, names=["cat/1.jpg"])
    manifest = read_manifest(target)
    number = next(number for number, shard in enumerate(manifest.shards) if shard.deleted)
    dataset = ShardDataset(target)
    place = next(place for place in map(dataset._index.place, range(len(dataset))) if place.shard == number)
    with open(target / manifest.shards[number].name, "r+b") as file:
        file.seek(place.offset + 100)
        file.write(b"wrong")
    with pytest.raises(ShardError, match=rf"at offset {place.offset}, .*not those that were packed .*pack --verify"):
        compact_set(target)
    assert read_manifest(target).generation == manifest.generation


def test_nothing_is_left_of_a_compaction_that_fails(target):
    """Two shards with deleted images, and one between them: the first is written when the second is read."""
    dataset = ShardDataset(target)
    of_shard = [dataset._index.place(i).shard for i in range(len(dataset))]
    damaged = dataset._index.place(of_shard.index(2) + 1)
    delete_images(target, names=[dataset.name(of_shard.index(number)) for number in (0, 2)])
    with open(target / "shard-000002.tar", "r+b") as file:
        file.seek(damaged.offset + 100)
        file.write(b"wrong")
    before = files_of(target)
    with pytest.raises(ShardError, match="not those that were packed"):
        compact_set(target)
    assert files_of(target) == before


def test_the_command(target, capsys):
    assert main(["compact", str(target)]) == 0
    assert "nothing to do: its shards hold no deleted image; generation 1" in capsys.readouterr().out
    main(["delete", str(target), "cat/1.jpg"])
    assert main(["compact", str(target)]) == 0
    assert "1 shard (0.0 MiB) written anew; generation 3 has 27 images" in capsys.readouterr().out
    assert main(["stat", str(target)]) == 0
    assert "compact 1 image" in capsys.readouterr().out
