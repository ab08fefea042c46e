"""MNIST from files that a user has: torchvision's folder, idx files packed or not, Keras' archive."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

import recipes.train
from lightning_ring.errors import ConfigurationError
from recipes.data.mnist import ARRAYS, IDX, MEAN, STD, Mnist

NUM_TRAIN, NUM_TEST = 60, 20


def arrays() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [
        array
        for num in (NUM_TRAIN, NUM_TEST)
        for array in (
            generator.integers(0, 256, (num, 28, 28), dtype=np.uint8),
            np.arange(num, dtype=np.uint8) % 10,
        )
    ]


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write(folder: Path, how: str) -> Path:
    """``folder``, which then has MNIST's files in the way ``how``."""
    place = folder / "MNIST" / "raw" if how == "torchvision" else folder
    place.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX, arrays(), strict=True):
        if how == "gz":
            (place / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        elif how != "npz":
            (place / name).write_bytes(idx(array))
    if how == "npz":
        np.savez_compressed(place / "mnist.npz", **dict(zip(ARRAYS, arrays(), strict=True)))
    return folder


def loaded(folder: Path) -> Mnist:
    data = Mnist(8, str(folder), val_fraction=0.1)
    data.prepare_data()
    data.setup("fit")
    return data


@pytest.mark.parametrize("how", ["plain", "gz", "torchvision", "npz"])
def test_every_layout_gives_the_same_images(how, tmp_path):
    before = sorted(write(tmp_path, how).rglob("*"))
    data = loaded(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before, "the folder may be another's: nothing is written there"
    train, train_labels, test, test_labels = arrays()
    images, labels = data.datasets["test"].tensors
    expected = (torch.from_numpy(test).double() / 255 - MEAN) / STD
    torch.testing.assert_close(images, expected[:, None].float())
    assert labels.tolist() == test_labels.tolist()
    sizes = {name: len(part) for name, part in data.datasets.items()}
    assert sizes == {"train": 50, "val": 10, "test": NUM_TEST}  # a tenth of 6 a class, rounded
    together = torch.cat([data.datasets[name].tensors[0] for name in ("train", "val")])
    assert together.sum().item() == pytest.approx(((train.astype(float) / 255 - MEAN) / STD).sum(), rel=1e-4)
    assert sorted(torch.cat([data.datasets[name].tensors[1] for name in ("train", "val")]).tolist()) == sorted(
        train_labels.tolist()
    )


def test_what_is_damaged_or_something_else_is_told(tmp_path):
    folder = write(tmp_path / "gz", "gz")
    whole = (folder / f"{IDX[0]}.gz").read_bytes()
    for content, message in (
        (whole[:200], "cannot be read"),
        (b"<!DOCTYPE html>", "cannot be read"),
        (gzip.compress(b"\0\0\x08"), "is no whole idx file"),
        (gzip.compress(idx(arrays()[0])[:-1]), "is no whole idx file"),
        (gzip.compress(idx(arrays()[0][:7])), r"holds images \[7, 28, 28\] of torch.uint8 and labels \[60\]"),
    ):
        (folder / f"{IDX[0]}.gz").write_bytes(content)
        with pytest.raises(ConfigurationError, match=message):
            loaded(folder)
    (folder / "mnist.npz").write_bytes(b"no archive")
    with pytest.raises(ConfigurationError, match=r"mnist.npz cannot be read .* Expected the arrays x_train"):
        loaded(folder)
    np.savez(folder / "mnist.npz", x_train=arrays()[0])
    with pytest.raises(ConfigurationError, match=r"mnist.npz cannot be read .* Expected the arrays x_train"):
        loaded(folder)
    floats = [array / 255 if array.ndim == 3 else array for array in arrays()]
    np.savez(folder / "mnist.npz", **dict(zip(ARRAYS, floats, strict=True)))
    with pytest.raises(ConfigurationError, match=r"of torch.float64 .* expected \[n, 28, 28\] of torch.uint8"):
        loaded(folder)


def test_what_cannot_be_had_is_told_with_the_command(composed, tmp_path, monkeypatch):
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", ["http://127.0.0.1:9/"])  # nothing listens there
    _, data = recipes.train.model_and_data(composed("experiment=mnist_resnet50", f"data.folder={tmp_path}"))
    with pytest.raises(ConfigurationError, match=rf"not in {tmp_path} .* run python -c .*download=True"):
        data.prepare_data()
    with pytest.raises(ConfigurationError, match=r"was not downloaded on this host.* data.folder=FOLDER"):
        data.setup("fit")


@pytest.mark.ranks
def test_the_recipe_trains_and_tests_on_it(composed, tmp_path):
    folder = write(tmp_path / "data", "gz")
    options = ("trainer.accelerator=cpu", "trainer.devices=1", "trainer.max_epochs=1", "schedule.warmup=1")
    small = ("model.network.name=resnet18", "data.batch_size=16", "data.val_fraction=0.2")
    config = composed("experiment=mnist_resnet50", f"data.folder={folder}", *small, *options)
    metrics = recipes.train.train(config)
    assert metrics["test/images"] == NUM_TEST
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 3
