"""The catalogue: what is drawn, how often, and what a folder may hold."""

import hashlib

import numpy as np
import pytest
from PIL import Image

from recipes.data.catalogue import SPLITS, Catalogue, make_catalogue, photographs
from tests.refusals import refused

TINY = Catalogue(2, 2, 4, 2, 1, 1, 2, size=32)


def digests(folder):
    files = sorted(folder.rglob("*.jpg"))
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "catalogue"
    make_catalogue(folder, TINY)
    return folder


def test_same_arguments_give_the_same_photographs_of_which_no_two_are_equal(made, tmp_path):
    make_catalogue(tmp_path / "again", TINY)
    assert digests(made) == digests(tmp_path / "again")
    assert len(set(digests(made).values())) == len(list(photographs(TINY)))
    for name in digests(made):
        with Image.open(made / name) as image:
            assert (image.format, image.size, image.mode) == ("JPEG", (32, 32), "RGB")
            assert np.asarray(image).std() > 5


def test_default_has_150_classes_and_a_long_tail():
    everything = list(photographs(Catalogue()))
    classes = {split: {thing for part, thing, _ in everything if part == split} for split in SPLITS}
    assert len(classes["train"]) == 110
    assert classes["val"] == classes["test"] == classes["train"]
    assert len(classes["unseen"]) == 40
    assert not classes["unseen"] & classes["train"]
    trained = [thing for split, thing, _ in everything if split == "train"]
    sizes = np.bincount(trained)
    assert (max(sizes), min(sizes)) == (100, 5)
    assert np.median(sizes) < np.mean(sizes)
    views = [(thing, view) for _, thing, view in everything]
    assert len(set(views)) == len(views)  # no photograph is in two splits


def test_catalogue_that_is_there_is_kept_and_anything_else_refused(made, tmp_path):
    before = {file: file.stat().st_mtime_ns for file in made.rglob("*")}
    make_catalogue(made, TINY)
    assert {file: file.stat().st_mtime_ns for file in made.rglob("*")} == before
    with refused("Move it away, or name another folder"):
        make_catalogue(made, Catalogue())
    (tmp_path / "mine.txt").touch()
    with refused("something that is not a catalogue"):
        make_catalogue(tmp_path, TINY)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]
