"""Photographs to embeddings, with the model and the crop of a trained run."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor, nn

from lightning_ring.data import CenterCrop, DeviceTransform
from lightning_ring.data.loading.pixels import decode_into
from lightning_ring.data.loading.transforms import height_and_width
from lightning_ring.data.packing.listing import EXTENSIONS
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores
from recipes.eval import saved_configuration

PREFIX = "embedder."  # of the embedder's weights in a checkpoint


@dataclass(frozen=True, slots=True)
class PhotoEmbedder:
    """Embeds photographs as the run evaluated images: the same crop, normalisation and weights.

    Attributes:
        checkpoint: Absolute path.
        digest: Of the embedder's weights.
    """

    embedder: nn.Module
    crop: CenterCrop
    checkpoint: str
    digest: str

    @classmethod
    def of(cls, checkpoint: str | Path) -> PhotoEmbedder:
        """Raises `ConfigurationError` or `SystemExit` with one line where ``checkpoint`` is of no recogniser."""
        config = saved_configuration([f"ckpt_path={checkpoint}"])
        if "embedder" not in config.model or "resize" not in config.data:
            raise ConfigurationError(
                f"{checkpoint} is of {config.model._target_} on {config.data._target_}, expected a recogniser of "
                "images: python recipes/train.py experiment=scan_to_identify"
            )
        embedder = instantiate(config.model.embedder)
        state = torch.load(checkpoint, map_location="cpu", weights_only=False)["state_dict"]
        weights = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
        embedder.load_state_dict(weights)
        digest = hashlib.sha256()
        for name, value in sorted(weights.items()):
            digest.update(name.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        crop = CenterCrop(config.data.image_size, resize=config.data.resize)
        return cls(embedder.eval(), crop, str(Path(checkpoint).absolute()), digest.hexdigest())

    @torch.inference_mode()
    def embed(self, files: Sequence[Path], threads: int | None = None) -> tuple[Tensor, dict[int, str]]:
        """Embeddings of unit length ``[files, embedding_size]``, and why a file has none, by its place.

        The row of a file that cannot be read means nothing.
        """
        rows = torch.zeros(len(files), *height_and_width(self.crop.size), 3, dtype=torch.uint8)
        images = rows.permute(0, 3, 1, 2)

        def decode(place: int) -> str | None:
            try:
                with torch.inference_mode():  # of this thread
                    decode_into([images[place : place + 1]], files[place].read_bytes(), [self.crop], [[]])
                return None
            except (ValueError, OSError, MemoryError) as error:
                return str(error)

        with ThreadPoolExecutor(threads or available_cores()) as pool:
            failed = {place: text for place, text in enumerate(pool.map(decode, range(len(files)))) if text}
        return F.normalize(self.embedder(DeviceTransform()(images, None))), failed


def photos_below(folder: Path) -> list[Path]:
    """All images below ``folder``, in the order of their paths; hidden files and folders are left out."""
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder; expected one that holds photographs.")
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )
    if not found:
        raise ConfigurationError(f"{folder} holds no images. Known extensions: {', '.join(EXTENSIONS)}.")
    return found
