"""MNIST: 70,000 handwritten digits of 28x28 pixels, read or downloaded by torchvision."""

from pathlib import Path

from torch import Tensor
from torchvision.datasets import MNIST

from lightning_ring.errors import ConfigurationError
from recipes.data.tensors import BatchedTensors, TensorImages, stratified_split

MEAN, STD = 0.1307, 0.3081  # of the training images' pixels in [0, 1]


class Mnist(TensorImages):
    """The images to train on, of which 5 % choose the best checkpoint, and those to test on.

    Args:
        batch_size: Images of one step over all ranks.
        folder: Holds the four idx files of MNIST in ``MNIST/raw``, where torchvision keeps them. If
            it does not, torchvision downloads them.
    """

    def __init__(self, batch_size: int, folder: str) -> None:
        super().__init__(batch_size)
        self.folder = Path(folder)

    def prepare_data(self) -> None:
        """Download what is missing."""
        self._open(train=True, download=True)

    def load(self) -> dict[str, BatchedTensors]:
        train, test = self._open(train=True), self._open(train=False)
        rest, val = stratified_split(train.targets, 0.05, seed=0)
        return {
            "train": BatchedTensors(normalised(train.data[rest]), train.targets[rest]),
            "val": BatchedTensors(normalised(train.data[val]), train.targets[val]),
            "test": BatchedTensors(normalised(test.data), test.targets),
        }

    def _open(self, *, train: bool, download: bool = False) -> MNIST:
        try:
            return MNIST(self.folder, train=train, download=download)
        # of the network, or whatever torchvision makes of a damaged file
        except Exception as error:
            raise ConfigurationError(
                f"MNIST cannot be read from {self.folder.absolute() / 'MNIST' / 'raw'}: "
                f"{' '.join(str(error).split()) or type(error).__name__}. Remove damaged files; "
                "where there is no network, copy the folder from another machine, or name one that "
                "holds it: data.folder=FOLDER"
            ) from error


def normalised(pixels: Tensor) -> Tensor:
    """uint8 ``[n, 28, 28]`` to float32 ``[n, 1, 28, 28]`` of mean 0 and standard deviation 1."""
    return pixels[:, None].float().div_(255).sub_(MEAN).div_(STD)
