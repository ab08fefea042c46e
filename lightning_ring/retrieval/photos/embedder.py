"""Photographs to embeddings, with the model and the crop of a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ring.data import CenterCrop, DeviceTransform
from lightning_ring.data.loading.pixels import decode_into
from lightning_ring.data.loading.transforms import height_and_width
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores
from lightning_ring.retrieval.photos.model import evaluation_crop, in_one_line, load_model, read_checkpoint

BATCH = 64  # photographs in memory at a time


@dataclass(frozen=True, slots=True)
class PhotoEmbedder:
    """Embeds photographs on the CPU: decoded as by `image_loader`, cropped, and normalised by ImageNet's mean.

    Attributes:
        model: Module from images ``[batch, 3, height, width]`` to embeddings ``[batch, embedding_size]``.
        checkpoint: Absolute path.
        class_path: Of the model's class, ``"module:Class"``.
        digest: Of the model's weights.
    """

    model: nn.Module
    crop: CenterCrop
    checkpoint: str
    class_path: str
    digest: str

    @classmethod
    def of(
        cls, checkpoint: str | Path, class_path: str | None = None, size: int | None = None, resize: int | None = None
    ) -> PhotoEmbedder:
        """The model of ``checkpoint``; arguments as of `load_model` and `evaluation_crop`.

        Raises:
            ConfigurationError: The checkpoint cannot be used, or its model does not embed images.
        """
        file = Path(checkpoint)
        saved = read_checkpoint(file)
        crop = evaluation_crop(file, saved, size, resize)
        model, class_path = load_model(file, saved, class_path)
        made = cls(model, crop, str(file.absolute()), class_path, _digest(model))
        made._try()
        return made

    def _try(self) -> None:
        """Embed a black image.

        Raises:
            ConfigurationError: That fails, or does not give an embedding.
        """
        sides = height_and_width(self.crop.size)
        try:
            found = self._outputs(torch.zeros(1, *sides, 3, dtype=torch.uint8).permute(0, 3, 1, 2))
        except Exception as error:  # of the user's model: anything
            raise ConfigurationError(
                f"{self.class_path} cannot embed images of 3 x {sides[0]} x {sides[1]} "
                f"({in_one_line(error)}). Give the size that it was trained on: --size PIXELS."
            ) from error
        if not isinstance(found, Tensor) or found.ndim != 2 or not found.is_floating_point():
            shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ConfigurationError(
                f"{self.class_path} gives {shape} for one image, expected a tensor [1, embedding_size]. Name a class "
                "whose forward gives embeddings: --model module:Class."
            )

    @torch.inference_mode()
    def _outputs(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.model(DeviceTransform()(images, None))
        return outputs

    def embed(
        self, files: Sequence[Path], progress: Callable[[int, int], object] = lambda done, total: None
    ) -> tuple[Tensor, dict[int, str]]:
        """Embed ``files``; ``progress`` is called with the numbers of files that are done, and of all.

        Returns:
            Embeddings of unit length ``[len(files), embedding_size]``, float32. For files that cannot be read: the
            reason, by their place in ``files``; their rows hold no embedding.

        Raises:
            ConfigurationError: An embedding is not finite.
        """
        rows: list[Tensor] = []
        failed: dict[int, str] = {}
        with ThreadPoolExecutor(available_cores()) as pool:
            for start in range(0, len(files), BATCH):
                images, reasons = self._decoded(files[start : start + BATCH], pool)
                rows.append(F.normalize(self._outputs(images).float()))
                failed |= {start + place: reason for place, reason in reasons.items()}
                progress(min(start + BATCH, len(files)), len(files))
        embeddings = torch.cat(rows)
        finite = torch.isfinite(embeddings).all(1)
        finite[list(failed)] = True  # a black image in the place of the file
        if not bool(finite.all()):
            first = files[int(finite.long().argmin())]
            raise ConfigurationError(
                f"the model of {self.checkpoint} gives {first} an embedding that is NaN or infinite: it has diverged. "
                "Name an earlier checkpoint."
            )
        return embeddings, failed

    def _decoded(self, files: Sequence[Path], pool: Executor) -> tuple[Tensor, dict[int, str]]:
        """Images ``[len(files), 3, height, width]``, uint8; and for files that are no image the reason, by place.

        The image of such a file is black.
        """
        rows = torch.zeros(len(files), *height_and_width(self.crop.size), 3, dtype=torch.uint8)
        images = rows.permute(0, 3, 1, 2)

        def decode(place: int) -> str | None:
            try:
                if not S_ISREG(files[place].stat().st_mode):
                    return "not a regular file"  # reading a named pipe would wait for ever
                with torch.inference_mode():  # of this thread
                    decode_into([images[place : place + 1]], files[place].read_bytes(), [self.crop], [[]])
                return None
            except (ValueError, OSError, MemoryError) as error:
                return str(error) or type(error).__name__

        reasons = dict(enumerate(pool.map(decode, range(len(files)))))
        return images, {place: reason for place, reason in reasons.items() if reason is not None}


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(name.encode() + value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
