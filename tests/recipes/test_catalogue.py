"""The catalogue: what is drawn, how often, and what a folder may hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import recipes.catalogue.make
from lightning_ring.errors import ConfigurationError
from recipes.catalogue.make import FAMILIES, SPLITS, Catalogue, make_catalogue, photographs, take

TINY = Catalogue(
    seen=1,
    unseen=1,
    most=4,
    fewest=2,
    val_photographs=1,
    test_photographs=1,
    unseen_photographs=2,
    size=32,
)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(folder.rglob("*.jpg"))
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    return make_catalogue(tmp_path_factory.mktemp("made") / "catalogue", TINY, num_workers=2)


def test_same_arguments_give_the_same_bytes_on_any_number_of_processes(made, tmp_path):
    again = make_catalogue(tmp_path / "again", TINY, num_workers=1)
    assert digests(made) == digests(again)
    # no two photographs are the same
    assert len(set(digests(made).values())) == len(list(photographs(TINY)))


def test_another_seed_is_another_catalogue():
    photo = next(photographs(TINY))
    pictures = [
        np.asarray(take(Catalogue(size=32, seed=seed), photo)[0], dtype=float) for seed in (0, 0, 1)
    ]
    assert np.array_equal(pictures[0], pictures[1])
    assert np.abs(pictures[0] - pictures[2]).mean() > 5


def test_default_has_five_families_150_classes_and_a_long_tail():
    everything = list(photographs(Catalogue()))
    classes = {
        split: {(p.family, p.number) for p in everything if p.split == split} for split in SPLITS
    }
    assert len(FAMILIES) == 5
    assert len(classes["train"]) == 110
    assert classes["val"] == classes["test"] == classes["train"]
    assert len(classes["unseen"]) == 40
    assert not classes["unseen"] & classes["train"]
    sizes = [
        sum(p.split == "train" and (p.family, p.number) == c for p in everything)
        for c in sorted(classes["train"])
    ]
    assert (max(sizes), min(sizes)) == (100, 5)
    assert sorted(sizes)[55] < np.mean(sizes)  # most classes have fewer than the mean
    views = [(p.family, p.number, p.view) for p in everything]
    assert len(set(views)) == len(views)  # no photograph is in two splits


def test_files_are_photographs_of_the_size_asked_for(made):
    for name in digests(made):
        with Image.open(made / name) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "RGB")
            assert np.asarray(image).std() > 5


def test_catalogue_that_is_there_is_kept_and_another_refused(made):
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*")}
    assert make_catalogue(made, TINY) == made
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*")} == before
    with pytest.raises(ConfigurationError, match=r"holds another catalogue\. Move it away"):
        make_catalogue(made, Catalogue())


def test_strange_folder_is_refused(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ConfigurationError, match="something that is not a catalogue"):
        make_catalogue(tmp_path, TINY)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_interrupted_drawing_leaves_nothing(tmp_path, monkeypatch):
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    # the record is written last
    monkeypatch.setattr(recipes.catalogue.make.json, "dumps", stopped_after(2, stopped))
    with pytest.raises(KeyboardInterrupt):
        make_catalogue(tmp_path / "catalogue", TINY, num_workers=1)
    assert list(tmp_path.iterdir()) == []


def stopped_after(calls: int, stopped):
    """`json.dumps` until the call with that number."""
    import json

    original, count = json.dumps, iter(range(1, 10))
    return lambda *args, **kwargs: stopped() if next(count) == calls else original(*args, **kwargs)


@pytest.mark.parametrize(
    "arguments", [{"fewest": 0}, {"most": 3, "fewest": 4}, {"size": 8}, {"test_photographs": 0}]
)
def test_impossible_catalogues_are_refused(arguments):
    with pytest.raises(ConfigurationError, match="a catalogue needs"):
        Catalogue(**arguments)
