"""What ShardDataset and ``lightning-ring pack --verify`` say of shards that are not what was
packed.
"""

import json
import shutil
import zlib

import numpy as np
import pytest

from lightning_ring.data import ShardDataset, shards
from lightning_ring.errors import ShardError
from tests.data.packing.packed import pack, verify
from tests.data.photos import image_folder

SHARD = "shard-000001.tar"
INDEX = "index/000000"
every_column = pytest.mark.parametrize(
    "name", ["labels.npy", "places.npy", "name_ends.npy", "names.txt"]
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    source = image_folder(root / "src", classes=2, images=12)
    pack(source, root / "dst")
    return root / "dst"


@pytest.fixture
def packed(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "dst")
    return tmp_path / "dst"


def first_place(packed):
    """The first image of SHARD, its offset and its length."""
    dataset = ShardDataset(packed)
    i = next(i for i in range(len(dataset)) if dataset._index.place(i).shard == 1)
    return i, *dataset._index.place(i)[1:3]


def overwrite(path, offset, data):
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_whole_packing_has_no_problem(packed):
    seen = []
    assert shards.verify(packed, 3, lambda *progress: seen.append(progress)) == []
    size = sum(path.stat().st_size for path in packed.glob("*.tar"))
    assert seen[-1] == (size, size)


@pytest.mark.parametrize("missing", [1, 512, 5000])
def test_a_shard_cut_short_is_named_when_opened_and_by_verify(packed, missing):
    path = packed / SHARD
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - missing)
    expected = f"{path} is cut short: it has {size - missing} bytes, expected {size}"
    with pytest.raises(ShardError) as error:
        ShardDataset(packed)
    assert expected in str(error.value)
    problems = verify(packed)
    assert problems[0] == expected
    assert problems[-1].startswith(f"{path} is not as it was packed")
    assert len(problems) == 2


def test_missing_longer_and_strange_shards_are_named(packed):
    (packed / SHARD).rename(packed / "other.tar")
    with open(packed / "shard-000000.tar", "ab") as file:
        file.write(b"x")
    problems = verify(packed)
    assert f"{packed / SHARD} cannot be read: No such file or directory" in problems
    assert any(
        problem.startswith(f"{packed / 'shard-000000.tar'} is longer than packed")
        for problem in problems
    )
    assert (
        f"{packed / 'other.tar'} is not in the manifest; a reader of *.tar reads it too" in problems
    )
    with pytest.raises(
        ShardError,
        match=r"(?s)longer than packed.*cannot be read: No such.*Restore what is missing",
    ):
        ShardDataset(packed)


def test_a_changed_byte_is_named_by_its_shard(packed):
    _, offset, size = first_place(packed)
    data = (packed / SHARD).read_bytes()
    overwrite(packed / SHARD, offset + size - 20, bytes([data[offset + size - 20] ^ 1]))
    problems = verify(packed)
    assert len(problems) == 1
    assert problems[0].startswith(f"{packed / SHARD} is not as it was packed")


def test_an_image_that_cannot_be_decoded_is_named_by_image_and_offset(packed):
    i, offset, size = first_place(packed)
    overwrite(packed / SHARD, offset, bytes(size))
    np.load(packed / INDEX / "places.npy", mmap_mode="r+")[i, 2] = zlib.crc32(bytes(size))
    dataset = ShardDataset(packed)
    for read in (lambda: dataset[i], lambda: dataset.__getitems__([0, i])):
        with pytest.raises(ShardError) as error:
            read()
        assert (
            f"image {i} ({dataset.name(i)}), {packed / SHARD} at offset {offset}, {size} bytes"
            in str(error.value)
        )
        assert "lightning-ring pack --verify" in str(error.value)


@pytest.mark.parametrize(
    "name", ["labels.npy", "places.npy", "name_ends.npy", "stamps.npy", "names.txt"]
)
def test_a_changed_index_is_named_and_blames_no_shard(packed, name):
    path = packed / INDEX / name
    overwrite(path, path.stat().st_size - 1, b"\x7f")
    (problem,) = verify(packed)
    assert problem.startswith(f"{path} is not as it was packed")


@every_column
def test_no_changed_byte_of_the_index_is_read_silently(packed, name):
    path = packed / INDEX / name
    data = path.read_bytes()
    for at in (len(data) - 2, len(data) - 9, len(data) // 2 + 40):
        overwrite(path, at, bytes([data[at] ^ 1]))
        with pytest.raises(
            ShardError, match=r"is not as it was packed|are not those that were packed|is damaged"
        ):
            read_everything(packed)
        overwrite(path, at, data[at : at + 1])
    read_everything(packed)


def read_everything(packed):
    dataset = ShardDataset(packed, decode=False)
    for i in range(len(dataset)):
        dataset[i]
    dataset.name(0)


@every_column
def test_an_index_that_is_missing_or_short_is_named(packed, name):
    path = packed / INDEX / name
    if name.endswith(".npy"):
        np.save(path, np.load(path)[:-1])
        with pytest.raises(
            ShardError, match=rf"{name} holds .* of shape \(23.*\), expected .* of shape\s+\(24.*\)"
        ):
            read_everything(packed)
        path.write_bytes(path.read_bytes()[:40])
        with pytest.raises(ShardError, match=f"{name} cannot be mapped"):
            read_everything(packed)
    path.unlink()
    with pytest.raises(ShardError, match=f"{name} cannot be mapped"):
        read_everything(packed)
    assert verify(packed) == [f"{path} cannot be read: No such file or directory"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields["classes"].append("more"), "fingerprint.*edited or damaged"),
        (lambda fields: fields.update(version=1), "'version': 1.*'version': 3}: pack the images"),
        (lambda fields: fields.update(format="zip"), "'format': 'zip'"),
        (lambda fields: fields.pop("shards"), "'shards' is missing or wrong"),
        (
            lambda fields: fields.update(generation="1"),
            "generation is missing or wrong|'generation'",
        ),
        (lambda fields: fields["shards"][0].update(bytes=-1), r"a number \(-1\)"),
        (
            lambda fields: fields["shards"][0].update(name="../evil"),
            r"name of a file \('\.\./evil'\)",
        ),
        (lambda fields: fields["files"].update({"/etc/passwd": ""}), "name of a file"),
        (lambda fields: fields["files"].pop(f"{INDEX}/labels.npy"), "checksum of index"),
    ],
)
def test_a_changed_manifest_is_named(packed, change, message):
    path = packed / "manifest.json"
    fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ShardError, match=message):
        ShardDataset(packed)


def test_a_folder_without_a_whole_manifest_is_no_data_set(packed):
    path = packed / "manifest.json"
    for content in (path.read_text()[:100], "[" * 100_000):
        path.write_text(content)
        with pytest.raises(ShardError, match=r"manifest\.json cannot be read"):
            ShardDataset(packed)
    path.unlink()
    with pytest.raises(
        ShardError, match=r"manifest\.json is not there\. .*makes a folder of packed shards"
    ):
        ShardDataset(packed)


def test_a_shard_that_shrinks_or_goes_after_it_was_opened_is_named(packed):
    i, offset, size = first_place(packed)
    dataset = ShardDataset(packed)
    with open(packed / SHARD, "r+b") as file:
        file.truncate(offset + 7)
    with pytest.raises(
        ShardError,
        match=rf"{SHARD} is cut short: at offset {offset} it has 7 bytes, expected {size}\.",
    ):
        dataset.read(i)
    (packed / "shard-000000.tar").unlink()
    with pytest.raises(
        ShardError, match=r"shard-000000\.tar cannot be read at offset 512, .*No such file"
    ):
        dataset.read(0)


@pytest.mark.parametrize("header", [b"{'descr': '<i4', 'shape': (", b"\0" * 20, b"\x93NUMPY\2\0"])
def test_a_damaged_header_of_the_index_is_named(packed, header):
    path = packed / INDEX / "labels.npy"
    overwrite(path, 0 if header[:1] == b"\x93" else 10, header)
    with pytest.raises(ShardError, match=r"labels\.npy cannot be mapped"):
        ShardDataset(packed)
