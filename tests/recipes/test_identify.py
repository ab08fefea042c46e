"""``recipes/identify.py`` on a checkpoint of the recipes."""

import sys

import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

import recipes.identify
import recipes.train
from lightning_ring.data import CenterCrop, ShardDataset
from recipes.recogniser import Recogniser
from tests.recipes.test_configs import TINY_CATALOGUE


def test_it_finds_the_nearest_images_of_the_run_and_draws_them(
    composed, catalogue, tmp_path, monkeypatch, capsys
):
    config = composed("experiment=scan_to_identify", *TINY_CATALOGUE, catalogue, "test=false")
    recipes.train.train(config)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(config, tmp_path / ".hydra" / "config.yaml")
    checkpoint = str(tmp_path / "checkpoints" / "last.ckpt")
    known = ShardDataset(f"{config.data.folder}/shards/test")
    photo = tmp_path / "asked.jpg"
    photo.write_bytes(known.read(3))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["identify.py", checkpoint, *map(str, arguments)])
        recipes.identify.main()
        return capsys.readouterr().out.splitlines()

    capsys.readouterr()
    said = run(photo, photo, "-k", 3, "-o", tmp_path / "found.png")
    assert said[0] == str(photo)
    assert said[1].startswith(f"  1. 1.000  {known.classes[known.labels[3]]}  ")
    assert known.name(3) in said[1]
    assert len(said) == 2 * 4 + 1
    assert Image.open(tmp_path / "found.png").width > 500

    model = Recogniser.load_from_checkpoint(checkpoint).eval()
    found = recipes.identify.embeddings(model, known, CenterCrop(32, resize=32))
    nearest = (found @ found[3]).topk(2)
    of_test = run(photo, "--gallery", known.root, "-k", 2, "-o", tmp_path / "found.png")
    assert [
        known.name(i) in line
        for i, line in zip(nearest.indices.tolist(), of_test[1:3], strict=True)
    ] == [True, True]
    assert [float(line.split()[1]) for line in of_test[1:3]] == pytest.approx(
        nearest.values.tolist(), abs=1e-3
    )
    assert torch.allclose(found.norm(dim=1), torch.ones(len(known)))

    (tmp_path / "text.jpg").write_text("some words")
    with pytest.raises(SystemExit, match=r"image 0 of list: cannot be decoded"):
        run(tmp_path / "text.jpg")
    with pytest.raises(SystemExit, match=r"nowhere\.jpg"):
        run(tmp_path / "nowhere.jpg")
