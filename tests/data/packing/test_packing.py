"""What a packing leaves on the disk."""

import csv
import os
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from lightning_ring.data import ShardDataset
from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.shards import read_manifest
from lightning_ring.errors import ConfigurationError
from tests.data.packing.packed import contents, pack
from tests.data.photos import encode, photo


def test_images_and_labels_are_those_of_image_folder(source, tmp_path):
    pack(source, tmp_path / "dst", PackSettings(size=0, group_by_class=True))
    dataset = ShardDataset(tmp_path / "dst", decode=False)
    expected = ImageFolder(str(source), allow_empty=True)
    usable = [
        (path, label)
        for path, label in expected.samples
        if Path(path).name not in ("broken.jpg", "text.jpg")
    ]
    assert dataset.classes == expected.classes
    assert dataset.labels.tolist() == [label for _, label in usable]
    assert [dataset.name(i) for i in range(len(dataset))] == [
        os.path.relpath(path, source) for path, _ in usable
    ]
    for i, (path, label) in enumerate(usable):
        if not path.endswith("cmyk.jpg"):
            assert dataset[i] == (Path(path).read_bytes(), label)


def test_everything_is_counted_and_named(source, packed):
    counts = read_manifest(packed).counts
    left_in = counts["copied"] + counts["shrunk"] + counts["turned"] + counts["converted"]
    assert left_in == len(ShardDataset(packed)) == 3 * 12 + 2
    assert (counts["left out"], counts["converted"], counts["empty classes"]) == (2, 1, 1)
    with open(packed / "report.csv", newline="", errors="surrogateescape") as file:
        rows = {name: (what, detail) for what, name, detail in csv.reader(file)}
    assert rows["class 1/broken.jpg"][0] == rows["class 1/text.jpg"][0] == "left out"
    assert rows["class 2/cmyk.jpg"] == ("converted", "CMYK to RGB")
    assert rows["empty"] == ("empty class", "has no image; label 3 does not occur")
    assert len(rows) == 5  # and the header


def test_shards_are_no_larger_than_asked_for(packed):
    manifest = read_manifest(packed)
    assert len(manifest.shards) > 3
    assert all(
        (packed / shard.name).stat().st_size == shard.bytes <= 16 * 1024
        for shard in manifest.shards
    )
    assert not (packed / ".packing").exists()


def test_an_image_larger_than_a_shard_has_one_of_its_own(source, tmp_path):
    pack(source, tmp_path / "dst", PackSettings(size=40, shard_mb=1e-4))
    assert {shard.samples for shard in read_manifest(tmp_path / "dst").shards} == {1}
    assert len(ShardDataset(tmp_path / "dst")) == 38


@pytest.mark.parametrize("workers", [1, 7])
def test_the_number_of_workers_changes_no_byte(source, packed, tmp_path, workers):
    pack(source, tmp_path / "dst", workers=workers)
    assert contents(tmp_path / "dst") == contents(packed)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("nowhere", "dst"),
            "nowhere is not there. Expected a folder with a folder for each class",
        ),
        (("src", "src/shards"), "is inside"),
        (("src", "other"), "other is not empty: it holds 'thesis.tex' and no packing"),
        (("bare", "dst"), "bare lists no image"),
        (
            ("broken", "dst"),
            "none of 1 images can be packed. The first of them:\nleft "
            "out,a/x.jpg,cannot be decoded",
        ),
    ],
)
def test_what_cannot_be_packed_says_why_and_leaves_nothing(tmp_path, names, message):
    for folder in ("src/a", "other", "bare", "broken/a"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "a" / "x.jpg").write_bytes(encode(photo()))
    (tmp_path / "other" / "thesis.tex").touch()
    (tmp_path / "broken" / "a" / "x.jpg").write_bytes(b"no")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigurationError, match=message):
        pack(tmp_path / names[0], tmp_path / names[1])
    assert sorted(path for path in tmp_path.rglob("*") if "dst" not in path.parts) == before


def test_a_csv_names_the_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a.gif").write_bytes(encode(photo(), "GIF"))
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "self.png").symlink_to("self.png")
    names = ("a.gif", "missing.jpg", "pipe.jpg", "self.png", long := "z" * 300)
    rows = "".join(f"{name},x\n" for name in names)
    (tmp_path / "train.csv").write_text(f"path,label\n{rows}.,y\n")
    manifest = pack(tmp_path / "train.csv", tmp_path / "dst")
    counts = manifest.counts
    assert (manifest.samples, counts["left out"], counts["empty classes"]) == (1, 5, 1)
    report = (tmp_path / "dst" / "report.csv").read_text()
    assert "left out,missing.jpg,cannot be read: No such file or directory\n" in report
    assert "left out,.,cannot be read: not a regular file\n" in report
    assert "left out,pipe.jpg,cannot be read: not a regular file\n" in report
    assert "left out,self.png,cannot be read: Too many levels of symbolic links\n" in report
    assert f"left out,{long},cannot be read: File name too long\n" in report
    assert "converted,a.gif,GIF to JPEG; P to RGB\n" in report
