"""Duplicates, near duplicates and leaks between splits, against a comparison of all with all."""

from __future__ import annotations

import csv
import io
import shutil

import numpy as np
import pytest

from lightning_ring.cli.main import main
from lightning_ring.data.sets.change import annotate_images
from lightning_ring.data.sets.duplicates import find_duplicates
from lightning_ring.data.sets.near import near_pairs
from lightning_ring.errors import ConfigurationError, ShardError
from tests.data.photos import decode, encode, photo
from tests.data.sets.daily import draw, pack


@pytest.mark.parametrize("distance", [0, 1, 4, 9, 15])
def test_near_pairs_are_those_of_all_with_all(distance):
    random = np.random.default_rng(distance)
    hashes = random.integers(0, 2**64, 300, dtype=np.uint64)
    for i in range(100, 300):  # copies with some bits flipped
        flips = random.choice(64, random.integers(0, 2 * distance + 2), replace=False)
        hashes[i] = hashes[random.integers(100)] ^ np.uint64(sum(1 << int(bit) for bit in flips))
    hashes[-1] = hashes[0]
    expected = {
        (i, j): bits
        for i in range(300)
        for j in range(i + 1, 300)
        if (bits := (int(hashes[i]) ^ int(hashes[j])).bit_count()) <= distance
    }
    found = [zip(i.tolist(), j.tolist(), bits.tolist(), strict=True) for i, j, bits in near_pairs(hashes, distance)]
    assert {(i, j): bits for piece in found for i, j, bits in piece} == expected
    assert expected


@pytest.fixture
def splits(tmp_path):
    """Train and validation, with planted copies."""
    train = draw(
        tmp_path / "train", {f"{kind}/{i}.jpg": 10 * i + len(kind) for kind in ("cat", "horse") for i in range(8)}
    )
    val = draw(tmp_path / "val", {f"cat/{i}.jpg": 500 + i for i in range(4)})
    shutil.copy(train / "cat/1.jpg", train / "horse/copy.jpg")  # equal bytes, in another class
    picture = decode((train / "cat/2.jpg").read_bytes())
    (train / "cat/again.jpg").write_bytes(encode(picture, quality=60))
    (val / "cat/leak.jpg").write_bytes(encode(picture.resize((60, 45)), quality=70))
    shutil.copy(train / "horse/3.jpg", val / "cat/exact.jpg")
    for name in ("train", "val"):
        pack(tmp_path / name, tmp_path / "packed" / name)
    return tmp_path / "packed"


def found(duplicates):
    return {(each.kind, each.distance is None, *sorted((each.image.name, each.of.name))) for each in duplicates}


EXACT = {("duplicate", True, "cat/1.jpg", "horse/copy.jpg"), ("leak", True, "cat/exact.jpg", "horse/3.jpg")}


def test_equal_bytes_are_found_without_a_library(splits):
    duplicates = find_duplicates([splits / "train", splits / "val"], distance=None)
    assert found(duplicates) == EXACT
    leak = next(each for each in duplicates if each.kind == "leak")
    assert (leak.image.split, leak.of.split) == (str(splits / "val"), str(splits / "train"))
    assert (leak.image.class_name, leak.of.class_name) == ("cat", "horse")
    assert found(find_duplicates([splits / "val"], distance=None)) == set()


def test_pictures_that_look_alike_are_found(splits):
    pytest.importorskip("imagehash")
    duplicates = find_duplicates([splits / "train", splits / "val"], distance=10, workers=2)
    assert found(duplicates) - EXACT == {
        ("near duplicate", False, "cat/2.jpg", "cat/again.jpg"),
        ("leak", False, *sorted(("cat/leak.jpg", first(duplicates, "cat/leak.jpg")))),
    }
    assert first(duplicates, "cat/leak.jpg") in ("cat/2.jpg", "cat/again.jpg")
    with pytest.raises(ConfigurationError, match="--distance 16: expected 0 to 15 bits"):
        find_duplicates([splits / "train"], distance=16)


def first(duplicates, name):
    return next(each.of.name for each in duplicates if each.image.name == name)


def test_many_images_of_one_picture_are_each_listed_once(tmp_path):
    pytest.importorskip("imagehash")
    black = encode(photo(3, 40, 30))
    for i in range(60):
        path = tmp_path / "src" / "a" / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(decode(black), "PNG", compress_level=i % 9))
    pack(tmp_path / "src", tmp_path / "dst")
    assert len(find_duplicates([tmp_path / "dst"])) == 59


def test_a_column_names_the_splits_and_the_command_lists_as_csv(splits, tmp_path, capsys):
    names = {"train": [f"cat/{i}.jpg" for i in range(8)], "val": [f"horse/{i}.jpg" for i in range(8)]}
    annotate_images(splits / "train", {"fold": {name: fold for fold, each in names.items() for name in each}})
    annotate_images(splits / "train", {"fold": {"horse/copy.jpg": "val", "cat/again.jpg": "train"}})
    assert main(["pack", "--check", "--exact", "--split-by", "fold", str(splits / "train")]) == 1
    output = capsys.readouterr()
    (row,) = csv.DictReader(io.StringIO(output.out))
    assert (row["kind"], row["distance"], {row["path"], row["of_path"]}) == (
        "leak",
        "equal",
        {"cat/1.jpg", "horse/copy.jpg"},
    )
    assert "1 leak; 1 of them in two classes" in output.err
    assert main(["pack", "--check", "--exact", str(splits / "val")]) == 0
    assert "no image is there twice" in capsys.readouterr().err
    assert main(["pack", "--check", "--split-by", "no", str(splits / "train")]) == 2
    assert "has no column of texts 'no'; it has fold" in capsys.readouterr().err


def test_a_damaged_image_is_not_compared(splits):
    (shard, *_) = sorted((splits / "val").glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[700] ^= 1
    shard.write_bytes(data)
    pytest.importorskip("imagehash")
    with pytest.raises(ShardError, match=r"they are not those that were packed \(CRC-32\)"):
        find_duplicates([splits / "val"])
