"""torchvision's MNIST: 70,000 handwritten digits of 28x28 pixels."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor
from torchvision.datasets import MNIST

from lightning_ring.errors import ConfigurationError
from recipes.data.split import stratified_split
from recipes.data.tensors import BatchedTensors, TensorImages

MEAN, STD = 0.1307, 0.3081  # of the training images' pixels in [0, 1]


class Mnist(TensorImages):
    """The 60,000 images to train on, of which some choose the best checkpoint, and the 10,000 to test on.

    Args:
        batch_size: Images of one step over all ranks.
        folder: Where torchvision keeps ``MNIST/raw``; downloaded into it where it is not there.
        val_fraction: Share of the 60,000 that chooses the best checkpoint.
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
        try:
            MNIST(str(self.folder), download=True)
        except (RuntimeError, OSError) as error:
            raise ConfigurationError(self._absent(f"cannot be downloaded: {' '.join(str(error).split())}")) from error

    def load(self) -> dict[str, BatchedTensors]:
        try:
            train, test = (MNIST(str(self.folder), train=train) for train in (True, False))
        except RuntimeError as error:
            raise ConfigurationError(self._absent("was not downloaded on this host")) from error
        rest, val = stratified_split(train.targets, self.val_fraction, self.split_seed)
        return {
            "train": BatchedTensors(normalised(train.data[rest]), train.targets[rest]),
            "val": BatchedTensors(normalised(train.data[val]), train.targets[val]),
            "test": BatchedTensors(normalised(test.data), test.targets),
        }

    def _absent(self, why: str) -> str:
        command = f"python -c \"from torchvision.datasets import MNIST; MNIST('{self.folder}', download=True)\""
        return (
            f"MNIST is not in {self.folder.absolute()}/MNIST/raw and {why}. Where there is a network, run {command} "
            "and copy the folder here, or name one that holds it: data.folder=FOLDER"
        )


def normalised(pixels: Tensor) -> Tensor:
    """uint8 ``[n, 28, 28]`` to float32 ``[n, 1, 28, 28]`` of mean 0 and standard deviation 1."""
    return pixels[:, None].float().div_(255).sub_(MEAN).div_(STD)
