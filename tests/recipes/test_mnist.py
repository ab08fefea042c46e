"""MNIST from files that a user has."""

import numpy as np
import pytest
import torch

import recipes.train
from recipes.data.mnist import MEAN, STD, Mnist
from tests.refusals import refused

IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
NUM_TRAIN, NUM_TEST = 200, 20


def arrays():
    generator = np.random.default_rng(0)
    return [
        array
        for num in (NUM_TRAIN, NUM_TEST)
        for array in (
            generator.integers(0, 256, (num, 28, 28), dtype=np.uint8),
            np.arange(num, dtype=np.uint8) % 10,
        )
    ]


def idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def write(folder):
    """``folder``, which then has MNIST's files as torchvision keeps them."""
    place = folder / "MNIST" / "raw"
    place.mkdir(parents=True, exist_ok=True)
    for name, array in zip(IDX, arrays(), strict=True):
        (place / name).write_bytes(idx(array))
    return folder


def loaded(folder):
    data = Mnist(8, str(folder))
    data.prepare_data()
    data.setup("fit")
    return data


def test_the_images_are_those_of_the_files(tmp_path):
    before = sorted(write(tmp_path).rglob("*"))
    data = loaded(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before, (
        "the folder may be another's: nothing is written there"
    )
    train, _, test, test_labels = arrays()
    images, labels = data.datasets["test"].tensors
    expected = (torch.from_numpy(test).double() / 255 - MEAN) / STD
    torch.testing.assert_close(images, expected[:, None].float())
    assert labels.tolist() == test_labels.tolist()
    sizes = {name: len(part) for name, part in data.datasets.items()}
    assert sizes == {"train": 190, "val": 10, "test": NUM_TEST}
    together = torch.cat([data.datasets[name].tensors[0] for name in ("train", "val")])
    labels = torch.cat([data.datasets[name].tensors[1] for name in ("train", "val")])
    assert labels.bincount().tolist() == [NUM_TRAIN // 10] * 10
    assert together.sum().item() == pytest.approx(
        ((train.astype(float) / 255 - MEAN) / STD).sum(), rel=1e-4
    )


@pytest.mark.parametrize(
    "content", [b"<!DOCTYPE html>", idx(arrays()[0])[:-1], idx(arrays()[0] / 255)]
)
def test_a_damaged_file_is_told(content, tmp_path):
    (write(tmp_path) / "MNIST" / "raw" / IDX[0]).write_bytes(content)
    with refused(r"cannot be read from .*raw: .* Remove damaged files"):
        loaded(tmp_path)


def test_what_cannot_be_had_is_told(composed, tmp_path, monkeypatch):
    # nothing listens there
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", ["http://127.0.0.1:9/"])
    _, data = recipes.train.model_and_data(
        composed("experiment=mnist_resnet50", f"data.folder={tmp_path}")
    )
    with refused(rf"cannot be read from {tmp_path}/MNIST/raw: .* copy the folder"):
        data.prepare_data()
    with refused(r"Dataset not found.* data.folder=FOLDER"):
        data.setup("fit")


@pytest.mark.ranks
def test_the_recipe_trains_and_tests_on_it(composed, tmp_path):
    folder = write(tmp_path / "data")
    options = (
        "trainer.accelerator=cpu",
        "trainer.devices=1",
        "trainer.max_epochs=1",
        "+trainer.limit_train_batches=2",
        "schedule.warmup=1",
    )
    small = ("model.network.name=resnet18", "data.batch_size=20")
    config = composed("experiment=mnist_resnet50", f"data.folder={folder}", *small, *options)
    metrics = recipes.train.train(config)
    assert metrics["test/images"] == NUM_TEST
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 2
