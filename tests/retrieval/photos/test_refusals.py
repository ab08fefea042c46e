"""What ``lightning-ring index`` and ``identify`` cannot work with is one line that says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_ring.cli.main import main
from lightning_ring.retrieval.photos.index import PhotoIndex
from tests.retrieval.photos.models import NAME, Embedder, Maps, OfOneSize, save

MODELS = "tests.retrieval.photos.models"


def test_an_index_or_a_photograph_that_cannot_be_used(indexed, refused):
    assert "nothing.index is not there. Make it: lightning-ring" in refused("identify", "a.jpg", "-i", "nothing.index")
    Path("text.index").write_text("text")
    assert "text.index cannot be read as an index" in refused("identify", "a.jpg", "-i", "text.index")
    torch.save({"format": "lightning_ring photographs 1"}, "old.index")
    assert "old.index is no index of this version" in refused("identify", "a.jpg", "-i", "old.index")
    assert "text.index cannot be read as an image" in refused("identify", "text.index")
    assert "none.jpg cannot be read as an image" in refused("identify", "none.jpg")
    assert "-k 0: expected 1 or more" in refused("identify", "photos/c0/0.jpg", "-k", "0")
    assert "cannot be written" in refused("identify", "photos/c0/0.jpg", "-o", "no/where.html")
    other = save(Path("other.ckpt"), seed=1)
    assert "made with other weights" in refused("identify", "photos/c0/0.jpg", "--checkpoint", str(other))


def test_no_file_that_is_read_is_written(indexed, refused):
    before = {path: path.read_bytes() for path in indexed.rglob("*.*") if path.is_file()}
    Path("link.html").symlink_to("photos/c0/0.jpg")
    for output in ("photos/c0/0.jpg", "link.html", "photographs.index"):
        assert f"-o {output}: this file is read" in refused("identify", "photos/c0/0.jpg", "-o", output)
    index = ("index", "model.ckpt", "photos", "--model", NAME, "--size", "32")
    assert "-o model.ckpt: this file is read" in refused(*index, "-o", "model.ckpt")
    assert {path: path.read_bytes() for path in before} == before


def test_a_folder_that_cannot_be_used(here, refused):
    index = ("index", "model.ckpt", "--model", NAME, "--size", "32")
    assert "nowhere is not a folder" in refused(*index, "nowhere")
    Path("empty/.hidden").mkdir(parents=True)
    assert "empty holds no images" in refused(*index, "empty")
    Path("empty/a.jpg").write_text("no image")
    Path("empty/b.jpg").write_text("no image")
    said = refused(*index, "empty")
    assert "none of the 2 images below empty can be read. The first: empty/a.jpg: " in said
    assert "b.jpg" not in said
    assert "cannot be written" in refused(*index, "photos", "-o", "no/where.index")
    assert "--size 0: expected 1 or more" in refused(*index, "photos", "--size", "0")
    assert not Path("photographs.index").exists()


def test_a_checkpoint_that_cannot_be_used(here, refused):
    def index(checkpoint: str, *options: str) -> str:
        return refused("index", checkpoint, "photos", *options)

    assert "photos is not a file. Expected a checkpoint" in index("photos")
    Path("text.ckpt").write_text("text")
    assert "text.ckpt cannot be read as a checkpoint" in index("text.ckpt")
    torch.save({"weights": 1}, "other.ckpt")
    assert "other.ckpt has no state_dict" in index("other.ckpt")
    assert "does not say how large the images" in index("model.ckpt", "--model", NAME)
    assert "does not name the class of its model" in index("model.ckpt", "--size", "32")
    assert "cannot cut 32 pixels out" in index("model.ckpt", "--size", "32", "--resize", "16")


def test_a_class_that_cannot_be_used(here, refused):
    def index(name: str, checkpoint: str = "model.ckpt") -> str:
        return refused("index", checkpoint, "photos", "--size", "48", "--model", name)

    for name in ("nowhere:Embedder", f"{MODELS}:Nothing", "Embedder"):
        assert f"{name} cannot be imported" in index(name)
    Path("raises_when_imported.py").write_text("1 / 0\n")
    assert "cannot be imported (ZeroDivisionError: division by zero)" in index("raises_when_imported:Embedder")
    assert f"{MODELS}:save has no load_from_checkpoint" in index(f"{MODELS}:save")
    assert f"{MODELS}:OfOneSize.load_from_checkpoint('model.ckpt') failed (RuntimeError" in index(f"{MODELS}:OfOneSize")
    save(Path("one_size.ckpt"), OfOneSize(16))
    assert "cannot embed images of 3 x 48 x 48 (RuntimeError" in index(f"{MODELS}:OfOneSize", "one_size.ckpt")
    save(Path("maps.ckpt"), Maps(16))
    assert "Maps gives [1, 16, 2, 2] for one image" in index(f"{MODELS}:Maps", "maps.ckpt")
    save(Path("diverged.ckpt"), Embedder(16, fill=torch.nan))
    assert "it has diverged" in index(NAME, "diverged.ckpt")


@pytest.mark.parametrize("key", ["_class_path", "_target_"])
def test_a_checkpoint_that_names_its_class_and_its_images_needs_no_options(here, key):
    named = {"embedding_size": 16, key: NAME.replace(":", ".")}
    save(Path("named.ckpt"), hyper_parameters=named, datamodule_hyper_parameters={"image_size": 32, "resize": 40})
    assert main(["index", "named.ckpt", "photos"]) == 0
    index = PhotoIndex.load(Path("photographs.index"))
    assert (index.size, index.resize, index.class_path) == (32, 40, NAME.replace(":", "."))
    assert main(["index", "named.ckpt", "photos", "--size", "24"]) == 0
    index = PhotoIndex.load(Path("photographs.index"))
    assert (index.size, index.resize) == (24, 24)


def test_a_model_of_the_working_folder(here):
    Path("my_model_of_this_folder.py").write_text("from tests.retrieval.photos.models import Embedder as Mine\n")
    assert main(["index", "model.ckpt", "photos", "--size", "32", "--model", "my_model_of_this_folder:Mine"]) == 0
    assert main(["identify", "photos/c0/0.jpg"]) == 0
