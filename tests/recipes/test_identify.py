"""``lightning-ring index`` on checkpoints of the recipes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import recipes.data.shards
import recipes.train
from lightning_ring.cli.main import main
from lightning_ring.data import ImageFolder, ShuffledSampler
from lightning_ring.retrieval.photos.index import PhotoIndex
from recipes.recogniser import Recogniser
from tests.images import write_folder
from tests.recipes.test_configs import TINY_CATALOGUE


@pytest.mark.parametrize("loss", [pytest.param("triplet", marks=pytest.mark.ranks), "sharded"])
def test_embeddings_are_those_of_the_runs_evaluation(loss, composed, catalogue, tmp_path, monkeypatch):
    config = composed("experiment=scan_to_identify", f"loss={loss}", *TINY_CATALOGUE, catalogue, "test=false")
    recipes.train.train(config)
    write_folder(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["index", "checkpoints/last.ckpt", "photos"]) == 0
    index = PhotoIndex.load(Path("photographs.index"))

    model, data = recipes.train.model_and_data(config)
    model.load_state_dict(torch.load("checkpoints/last.ckpt")["state_dict"])
    photos = ImageFolder("photos")
    data.datasets = {"val": photos}
    sampler = ShuffledSampler(21, shuffle=False, rank=0, world_size=1)
    loader = data._loader("val", sampler, 8, crop=data.val_crop, transform=recipes.data.shards.DeviceTransform())
    with torch.no_grad():
        expected = torch.cat([model.eval()(batch[0]) for batch in loader])
    assert index.files == [photos.name(i) for i in range(21)]
    torch.testing.assert_close(index.embeddings, expected)

    changed = Recogniser.load_from_checkpoint(
        "checkpoints/last.ckpt", metric_loss=None, label_smoothing=0.5, strict=False
    )
    assert (changed.metric_loss, changed.label_smoothing) == (None, 0.5)
