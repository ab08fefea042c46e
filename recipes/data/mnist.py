"""MNIST: 70,000 handwritten digits of 28x28 pixels, read and where needed downloaded by
torchvision.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torchvision.datasets import MNIST

from lightning_ring.errors import ConfigurationError
from recipes.data.split import stratified_split
from recipes.data.tensors import BatchedTensors, TensorImages

MEAN, STD = 0.1307, 0.3081  # of the training images' pixels in [0, 1]


class Mnist(TensorImages):
    """The images to train on, of which some choose the best checkpoint, and those to test on.

    Args:
        batch_size: Images of one step over all ranks.
        folder: Holds the four idx files of MNIST in ``MNIST/raw``, where torchvision keeps them. If
            it does not, torchvision downloads them.
        val_fraction: Share of the training images that chooses the best checkpoint.
        split_seed: Chooses them; independent of the seed of a run.
    """

    def __init__(
        self, batch_size: int, folder: str, val_fraction: float = 0.05, split_seed: int = 0
    ) -> None:
        super().__init__(batch_size)
        self.folder = Path(folder)
        self.val_fraction = val_fraction
        self.split_seed = split_seed

    def prepare_data(self) -> None:
        """Download what is missing. Raises `ConfigurationError`: the download failed, or a file
        is damaged.
        """
        self._open(train=True, download=True)

    def load(self) -> dict[str, BatchedTensors]:
        train, test = self._open(train=True), self._open(train=False)
        rest, val = stratified_split(train.targets, self.val_fraction, self.split_seed)
        parts = {
            "train": (train.data[rest], train.targets[rest]),
            "val": (train.data[val], train.targets[val]),
            "test": (test.data, test.targets),
        }
        return {
            name: BatchedTensors(normalised(images), numbers)
            for name, (images, numbers) in parts.items()
        }

    def _open(self, *, train: bool, download: bool = False) -> MNIST:
        try:
            return MNIST(self.folder, train=train, download=download)
        # of the network, or whatever torchvision makes of a damaged file
        except Exception as error:
            command = (
                f"from torchvision.datasets import MNIST; MNIST('{self.folder}', download=True)"
            )
            raise ConfigurationError(
                f"MNIST cannot be read from {self.folder.absolute() / 'MNIST' / 'raw'}: "
                f"{' '.join(str(error).split()) or type(error).__name__}. Remove damaged files. On "
                f'a machine with a network, run python -c "{command}" and copy the folder here, or '
                "name a folder that holds it: data.folder=FOLDER"
            ) from error


def normalised(pixels: Tensor) -> Tensor:
    """uint8 ``[n, 28, 28]`` to float32 ``[n, 1, 28, 28]`` of mean 0 and standard deviation 1."""
    return pixels[:, None].float().div_(255).sub_(MEAN).div_(STD)
