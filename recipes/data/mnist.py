"""MNIST: 70,000 handwritten digits of 28x28 pixels, from a folder that has them, else downloaded by torchvision."""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets import MNIST

from lightning_ring.errors import ConfigurationError
from recipes.data.split import stratified_split
from recipes.data.tensors import BatchedTensors, TensorImages

MEAN, STD = 0.1307, 0.3081  # of the training images' pixels in [0, 1]
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
NPZ = "mnist.npz"
ARRAYS = ("x_train", "y_train", "x_test", "y_test")


class Mnist(TensorImages):
    """The images to train on, of which some choose the best checkpoint, and those to test on.

    Args:
        batch_size: Images of one step over all ranks.
        folder: With the four idx files of MNIST, as they are or as ``.gz``; or with those in its ``MNIST/raw``, where
            torchvision keeps them; or with ``mnist.npz``, as Keras has it. Where there are none torchvision downloads
            them.
        val_fraction: Share of the training images that chooses the best checkpoint.
        split_seed: Chooses them; independent of the seed of a run.
    """

    def __init__(self, batch_size: int, folder: str, val_fraction: float = 0.05, split_seed: int = 0) -> None:
        super().__init__(batch_size)
        self.folder = Path(folder)
        self.val_fraction = val_fraction
        self.split_seed = split_seed

    def prepare_data(self) -> None:
        """Download what is missing.

        Raises:
            ConfigurationError: That cannot be done.
        """
        if files_in(self.folder):
            return
        try:
            MNIST(str(self.folder), download=True)
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(self._absent(f"cannot be downloaded: {' '.join(str(error).split())}")) from error

    def load(self) -> dict[str, BatchedTensors]:
        files = files_in(self.folder)
        if not files:
            raise ConfigurationError(self._absent("was not downloaded on this host"))
        (pixels, labels), test = read(files)
        rest, val = stratified_split(labels, self.val_fraction, self.split_seed)
        parts = {"train": (pixels[rest], labels[rest]), "val": (pixels[val], labels[val]), "test": test}
        return {name: BatchedTensors(normalised(images), numbers) for name, (images, numbers) in parts.items()}

    def _absent(self, why: str) -> str:
        command = f"python -c \"from torchvision.datasets import MNIST; MNIST('{self.folder}', download=True)\""
        return (
            f"MNIST is not in {self.folder.absolute()} ({IDX[0]}, with or without .gz, and so on; in MNIST/raw; or "
            f"{NPZ}), and {why}. Where there is a network, run {command} and copy the folder here, or name one that "
            "holds it: data.folder=FOLDER"
        )


def files_in(folder: Path) -> list[Path]:
    """MNIST's files in ``folder``: one .npz, or those of `IDX`; none where one is missing."""
    if (folder / NPZ).is_file():
        return [folder / NPZ]
    for place in (folder, folder / "MNIST" / "raw"):
        found = [[file for file in (place / name, place / f"{name}.gz") if file.is_file()] for name in IDX]
        if all(found):
            return [files[0] for files in found]
    return []


def read(files: Sequence[Path]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Images, uint8 ``[n, height, width]``, and their labels ``[n]``: those to train on, those to test on.

    Raises:
        ConfigurationError: A file is damaged, or holds something else.
    """
    train, train_labels, test, test_labels = read_npz(*files) if len(files) == 1 else map(read_idx, files)
    for images, labels in ((train, train_labels), (test, test_labels)):
        if images.ndim != 3 or labels.shape != images.shape[:1] or images.dtype != torch.uint8:
            raise ConfigurationError(
                f"{files[0].parent} holds images {list(images.shape)} of {images.dtype} and labels "
                f"{list(labels.shape)}, expected [n, 28, 28] of torch.uint8 and [n]. Get the files of MNIST again."
            )
    return (train, train_labels.long()), (test, test_labels.long())


def read_npz(file: Path) -> list[Tensor]:
    try:
        with np.load(file) as arrays:
            return [torch.from_numpy(arrays[name]) for name in ARRAYS]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigurationError(
            f"{file} cannot be read ({error}). Expected the arrays {', '.join(ARRAYS)}."
        ) from error


def read_idx(file: Path) -> Tensor:
    """The bytes of an idx file, in its shape: two zeros, 8 for bytes, the number of dimensions, each big-endian."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as opened:
            data = opened.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigurationError(f"{file} cannot be read ({error}). Get the files of MNIST again.") from error
    start = 4 + 4 * data[3] if len(data) > 3 else 4
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    if data[:3] != b"\0\0\x08" or len(data) != start + math.prod(shape):
        raise ConfigurationError(f"{file} is no whole idx file of bytes. Get the files of MNIST again.")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=start).view(shape)


def normalised(pixels: Tensor) -> Tensor:
    """uint8 ``[n, 28, 28]`` to float32 ``[n, 1, 28, 28]`` of mean 0 and standard deviation 1."""
    return pixels[:, None].float().div_(255).sub_(MEAN).div_(STD)
