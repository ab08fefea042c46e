"""``recipes/index.py`` and ``recipes/identify.py``: from a checkpoint and a folder to the nearest photographs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

import recipes.data.shards
import recipes.identify
import recipes.index
import recipes.train
from lightning_ring.data import ImageFolder, ShuffledSampler
from recipes.recognition.photo_index import PhotoIndex
from recipes.recognition.photos import PhotoEmbedder
from tests.images import write_folder
from tests.monitor.browser import NAMES, executable, open_browser


def finished_run(composed, folder: Path, seed: int = 0, **changes: str) -> Path:
    """A checkpoint of a recogniser that learned nothing, as a run leaves it."""
    changed = [f"{name}={value}" for name, value in changes.items()]
    config = composed("experiment=scan_to_identify", "data.num_classes=3", "model.embedding_size=16", *changed)
    torch.manual_seed(seed)
    model, _ = recipes.train.model_and_data(config)
    (folder / ".hydra").mkdir(parents=True)
    (folder / "checkpoints").mkdir()
    OmegaConf.save(config, folder / ".hydra" / "config.yaml")
    torch.save({"state_dict": model.state_dict()}, folder / "checkpoints" / "best.ckpt")
    return folder / "checkpoints" / "best.ckpt"


@pytest.fixture
def indexed(composed, tmp_path, monkeypatch):
    """``photos/c0/0.jpg`` and so on, in the index; works in the folder above them."""
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "photos")
    checkpoint = finished_run(composed, tmp_path / "run")
    recipes.index.main([str(checkpoint), "photos"])
    return tmp_path


def test_embeddings_are_those_of_the_runs_evaluation(indexed, composed):
    index = PhotoIndex.load(Path("photographs.index"))
    config = OmegaConf.load("run/.hydra/config.yaml")
    model, data = recipes.train.model_and_data(config)
    model.load_state_dict(torch.load("run/checkpoints/best.ckpt")["state_dict"])
    photos = ImageFolder("photos")
    data.datasets = {"val": photos}
    loader = data._loader(
        "val",
        ShuffledSampler(21, shuffle=False, rank=0, world_size=1),
        8,
        crop=data.val_crop,
        transform=recipes.data.shards.DeviceTransform(),
    )
    with torch.no_grad():
        expected = torch.cat([model.eval()(batch[0]) for batch in loader])
    assert index.files == [photos.name(i) for i in range(21)]
    torch.testing.assert_close(index.embeddings, expected)


def test_a_copy_finds_its_original_and_a_photograph_never_itself(indexed, capsys):
    Image.open("photos/c1/4.jpg").save("shot.png")  # the same pixels
    for further in ([], ["--rerank"]):
        recipes.identify.main(["shot.png", "photos/c1/4.jpg", *further])
        said = capsys.readouterr().out.splitlines()
        places = said.index("shot.png"), said.index("photos/c1/4.jpg")
        assert said[places[0] + 1].endswith("/photos/c1/4.jpg")
        assert "c1" in said[places[0] + 1].split()
        assert places[1] == places[0] + 6
        assert not [line for line in said[places[1] + 1 :] if line.endswith("c1/4.jpg")]
        assert said[-1] == "page: identified.html"
    similarity = [float(line.split()[1]) for line in said[places[1] + 1 : -1]]
    assert len(similarity) == 5


def test_a_flat_folder_a_small_one_and_a_broken_photograph(indexed, capsys):
    flat = indexed / "flat"
    flat.mkdir()
    for number in range(3):
        shutil.copy(f"photos/c{number}/0.jpg", flat / f"{number} & <b>.jpg")
    (flat / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    (flat / ".hidden.jpg").write_bytes(b"")
    recipes.index.main(["run/checkpoints/best.ckpt", "flat", "-o", "flat.index"])
    said = capsys.readouterr()
    assert "flat.index: 3 photographs, 1 left out" in said.out
    assert "left out: flat/broken.jpg: " in said.err
    recipes.identify.main(["flat/0 & <b>.jpg", "-i", "flat.index", "-k", "9", "-o", "flat.html"])
    assert capsys.readouterr().out.count("flat/") == 3  # the photograph, and the two others
    assert "&amp; &lt;b&gt;.jpg" in Path("flat.html").read_text()
    assert "<b>" not in Path("flat.html").read_text()


def test_what_cannot_work_is_one_line(indexed, composed):
    def says(command, *arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            command.main(arguments)
        return str(end.value)

    assert "nothing.index is not there. Make it: python" in says(recipes.identify, "a.jpg", "-i", "nothing.index")
    Path("text.index").write_text("text")
    assert "text.index cannot be read as an index" in says(recipes.identify, "a.jpg", "-i", "text.index")
    torch.save({"other": 1}, "other.index")
    assert "other.index is no index of photographs" in says(recipes.identify, "a.jpg", "-i", "other.index")
    assert "text.index cannot be read as an image" in says(recipes.identify, "text.index")
    assert "none.jpg cannot be read as an image" in says(recipes.identify, "none.jpg")
    assert "nowhere is not a folder" in says(recipes.index, "run/checkpoints/best.ckpt", "nowhere")
    assert "run holds no images" in says(recipes.index, "run/checkpoints/best.ckpt", "run")
    assert "cannot be written" in says(recipes.index, "run/checkpoints/best.ckpt", "photos", "-o", "no/where.index")
    assert "is not there. Expected a checkpoint" in says(recipes.index, "run/checkpoints/last.ckpt", "photos")
    other = finished_run(composed, indexed / "other", seed=1)
    assert "made with other weights" in says(recipes.identify, "photos/c0/0.jpg", "--checkpoint", str(other))
    (indexed / "digits" / ".hydra").mkdir(parents=True)
    OmegaConf.save(composed("experiment=debug"), indexed / "digits" / ".hydra" / "config.yaml")
    (indexed / "digits" / "checkpoints").mkdir()
    torch.save({}, indexed / "digits" / "checkpoints" / "best.ckpt")
    assert "expected a recogniser" in says(recipes.index, "digits/checkpoints/best.ckpt", "photos")


def test_a_moved_run_keeps_its_index(indexed):
    (indexed / "run").rename(indexed / "moved")
    checkpoint = "moved/checkpoints/best.ckpt"
    recipes.identify.main(["photos/c0/0.jpg", "--checkpoint", checkpoint])
    assert PhotoEmbedder.of(checkpoint).digest == PhotoIndex.load(Path("photographs.index")).digest


@pytest.mark.ranks
@pytest.mark.skipif(executable() is None, reason=f"none of {NAMES} is installed")
def test_the_page_shows_the_photographs_in_a_browser(indexed):
    recipes.identify.main(["photos/c1/4.jpg", "photos/c2/0.jpg"])
    with open_browser(indexed / "profile") as browser:
        for width in (1300, 400):
            browser.size(width, 900)
            browser.open((indexed / "identified.html").as_uri())
            text = browser.wait_for("Nearest of 21 photographs", "similarity")
            assert text.count("similarity") == 10
            assert browser.evaluate("[...document.images].filter(i => i.complete && i.naturalWidth > 50).length") == 12
            scrolls = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
            assert browser.evaluate(scrolls) == 0
