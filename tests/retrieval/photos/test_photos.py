"""``lightning-ring index`` and ``identify``: from a checkpoint and a folder to the nearest photographs."""

from __future__ import annotations

import base64
import io
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import normalize

from lightning_ring.cli.main import main
from lightning_ring.data import CenterCrop, DeviceTransform
from lightning_ring.data.loading.pixels import decode_into
from lightning_ring.retrieval.photos.index import PhotoIndex
from lightning_ring.retrieval.photos.page import page_of
from tests.full_disk import files_of_at_most
from tests.images import picture
from tests.monitor.browser import NAMES, executable, open_browser
from tests.retrieval.photos.models import NAME, Embedder, Standardising, save

INDEX = ["index", "model.ckpt", "--model", NAME, "--size", "32"]


def found_for(photo: str, said: str) -> list[str]:
    """The lines of what was found for ``photo``."""
    lines = said.splitlines()
    rest = lines[lines.index(photo) + 1 :]
    return rest[: next(number for number, line in enumerate(rest) if not line.startswith("  "))]


def test_embeddings_are_the_models_of_the_cropped_and_normalised_pixels(indexed):
    index = PhotoIndex.load(Path("photographs.index"))
    assert index.files == [f"c{label}/{number}.jpg" for label in range(3) for number in range(7)]
    pixels = torch.zeros(21, 32, 32, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    for place, file in enumerate(index.files):
        data = Path("photos", file).read_bytes()
        decode_into([pixels[place : place + 1]], data, [CenterCrop(32, resize=32)], [[]])
    model = Embedder.load_from_checkpoint("model.ckpt")
    with torch.no_grad():
        expected = normalize(model.eval()(DeviceTransform()(pixels, None)))
    torch.testing.assert_close(index.embeddings, expected)


def test_a_copy_finds_its_original_and_a_photograph_never_itself(indexed, capsys):
    Image.open("photos/c1/4.jpg").save("shot.png")  # the same pixels
    Path("link.jpg").symlink_to("photos/c1/4.jpg")
    for further in ([], ["--rerank"]):
        assert main(["identify", "shot.png", "photos/c0/../c1/4.jpg", "link.jpg", *further]) == 0
        said = capsys.readouterr().out
        best, *_ = found_for("shot.png", said)
        assert best.endswith("/photos/c1/4.jpg")
        assert best.split()[1:3] == ["1.000", "c1"]
        for photo in ("photos/c0/../c1/4.jpg", "link.jpg"):
            lines = found_for(photo, said)
            assert len(lines) == 5
            assert not [line for line in lines if line.endswith("c1/4.jpg")]
        assert said.endswith("page: identified.html\n")


def test_photographs_behind_links_are_found_and_do_not_find_themselves(here, capsys):
    outside = here / "outside"
    (here / "photos" / "c2").rename(outside)
    (here / "photos" / "c2").symlink_to(outside)
    (here / "photos" / "c0" / "again").symlink_to(here / "photos")  # leads back
    assert main([*INDEX, "photos"]) == 0
    said = capsys.readouterr()
    assert said.out == "photographs.index: 21 photographs, 1 left out\n"
    assert said.err == "left out: photos/c0/again: a link to a folder that it is in\n"
    assert main(["identify", "photos/c2/3.jpg", "-k", "99"]) == 0
    lines = found_for("photos/c2/3.jpg", capsys.readouterr().out)
    assert len(lines) == 20
    assert not [line for line in lines if line.endswith("c2/3.jpg")]


def test_a_flat_folder_a_small_one_and_a_broken_photograph(indexed, capsys):
    flat = indexed / "flat"
    flat.mkdir()
    for number in range(3):
        shutil.copy(f"photos/c{number}/0.jpg", flat / f"{number} & <b>.jpg")
    (flat / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    (flat / ".hidden.jpg").write_bytes(b"")
    assert main([*INDEX, "flat", "-o", "flat.index"]) == 0
    said = capsys.readouterr()
    assert "flat.index: 3 photographs, 1 left out" in said.out
    assert "left out: flat/broken.jpg: " in said.err
    for further in ([], ["--rerank"]):
        assert main(["identify", "flat/0 & <b>.jpg", "-i", "flat.index", "-k", "9", "-o", "flat.html", *further]) == 0
        assert capsys.readouterr().out.count("flat/") == 3  # the photograph, and the two others
    assert "&amp; &lt;b&gt;.jpg" in Path("flat.html").read_text()
    assert "<b>" not in Path("flat.html").read_text()


def test_a_broken_photograph_is_left_out_by_a_model_that_cannot_embed_black_images(here, capsys):
    save(here / "standardising.ckpt", Standardising(16))
    (here / "photos" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    command = ["index", "standardising.ckpt", "photos", "--size", "32"]
    assert main([*command, "--model", NAME.replace("Embedder", "Standardising")]) == 0
    assert "21 photographs, 1 left out" in capsys.readouterr().out
    Image.new("RGB", (40, 40)).save(here / "photos" / "black.png")
    assert main([*command, "--model", NAME.replace("Embedder", "Standardising")]) == 2
    assert "gives photos/black.png an embedding that is NaN or infinite" in capsys.readouterr().err


def test_a_named_pipe_is_left_out(here, capsys):
    os.mkfifo(here / "photos" / "pipe.jpg")
    assert main([*INDEX, "photos"]) == 0
    assert capsys.readouterr().err == "left out: photos/pipe.jpg: not a regular file\n"


def test_a_line_of_pixels_is_shown(indexed):
    Image.new("RGB", (1, 5000), "blue").save("line.png")
    assert main(["identify", "line.png", "-k", "1"]) == 0
    shown = Path("identified.html").read_text().split("base64,")[1].split('"')[0]
    assert Image.open(io.BytesIO(base64.b64decode(shown))).size == (1, 220)


def test_hidden_folders_are_not_looked_into(here, capsys):
    hidden = here / "photos" / ".trash"
    hidden.mkdir()
    (hidden / "loop").symlink_to(here / "photos")
    shutil.copy("photos/c0/0.jpg", hidden / "old.jpg")
    assert main([*INDEX, "photos"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("photographs.index: 21 photographs\n", "")


def test_more_photographs_than_a_batch_and_names_that_are_no_text(here, capsys, monkeypatch):
    monkeypatch.setattr("lightning_ring.retrieval.photos.embedder.BATCH", 5)
    strange = os.fsencode(here) + b"/photos/c0/caf\xe9.png"
    Image.fromarray(picture(7, 40, 40)).save(here / "new.png")
    os.rename(here / "new.png", strange)
    os.mkdir(os.fsencode(here) + b"/photos/\xe9")
    Path(os.fsdecode(os.fsencode(here) + b"/photos/\xe9/broken.jpg")).write_bytes(b"no image")
    assert main([*INDEX, "photos"]) == 0
    said = capsys.readouterr()
    assert said.out == "photographs.index: 22 photographs, 1 left out\n"
    assert "left out: photos/\N{REPLACEMENT CHARACTER}/broken.jpg: " in said.err
    assert main(["identify", os.fsdecode(strange), "photos/c0/0.jpg", "-k", "21"]) == 0
    said = capsys.readouterr().out
    assert said.count("caf\N{REPLACEMENT CHARACTER}.png") == 2
    assert "caf\N{REPLACEMENT CHARACTER}.png" in Path("identified.html").read_text(encoding="utf-8")
    index = PhotoIndex.load(Path("photographs.index"))
    assert index.files[7] == os.fsdecode(b"c0/caf\xe9.png")
    assert len({tuple(row) for row in index.embeddings.tolist()}) == 22


def test_pictures_of_16_bits_are_shown_as_the_model_sees_them(here):
    deep = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    Image.fromarray(deep).save(here / "deep.png")
    page = page_of([here / "deep.png"], [[]], 0, "model.ckpt")
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(page.split("base64,")[1].split('"')[0]))))
    assert 100 < shown.mean() < 155  # clipped at 255 it would be almost white


def test_a_full_disk_leaves_index_and_page_as_they_were(indexed, capsys):
    assert main(["identify", "photos/c0/0.jpg"]) == 0
    before = {path: path.read_bytes() for path in indexed.iterdir() if path.is_file()}
    with files_of_at_most(1000):
        assert main([*INDEX, "photos"]) == 1
        assert main(["identify", "photos/c1/0.jpg"]) == 1
    assert capsys.readouterr().err.count("File too large") == 2
    assert {path: path.read_bytes() for path in indexed.iterdir() if path.is_file()} == before


def test_a_moved_checkpoint_keeps_its_index(indexed):
    Path("model.ckpt").rename("moved.ckpt")
    assert main(["identify", "photos/c0/0.jpg", "--checkpoint", "moved.ckpt"]) == 0


@pytest.mark.ranks
@pytest.mark.skipif(executable() is None, reason=f"none of {NAMES} is installed")
def test_the_page_shows_the_photographs_in_a_browser(indexed):
    assert main(["identify", "photos/c1/4.jpg", "photos/c2/0.jpg"]) == 0
    with open_browser(indexed / "profile") as browser:
        for width in (1300, 400):
            browser.size(width, 900)
            browser.open((indexed / "identified.html").as_uri())
            text = browser.wait_for("Nearest of 21 photographs", "similarity")
            assert text.count("similarity") == 10
            assert browser.evaluate("[...document.images].filter(i => i.complete && i.naturalWidth > 50).length") == 12
            scrolls = "document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth"
            assert browser.evaluate(scrolls) == 0
