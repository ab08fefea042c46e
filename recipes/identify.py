"""Finds what is on a photograph: ``python recipes/identify.py CHECKPOINT PHOTO``, with a
recogniser of the recipes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from torch import Tensor, nn

# run as a script: make `recipes` importable, instead of this folder's modules at the top level
if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from lightning_ring.data import (
    CenterCrop,
    DeviceTransform,
    ImageFolder,
    MapStyleImages,
    Mixture,
    ShardDataset,
    ShuffledSampler,
    image_loader,
)
from lightning_ring.errors import RingError
from lightning_ring.retrieval import search
from recipes.data.shards import MANIFEST
from recipes.eval import saved_configuration


def gallery_of(folder: Path) -> Mixture:
    """The images of ``folder``: packed sets in it, one packed set, or a folder for each class."""
    if (folder / MANIFEST).is_file():
        return Mixture([ShardDataset(folder)])
    packed = [ShardDataset(file.parent) for file in sorted(folder.glob(f"*/{MANIFEST}"))]
    return Mixture(packed or [ImageFolder(folder)])


@torch.inference_mode()
def embeddings(model: nn.Module, images: Any, crop: CenterCrop) -> Tensor:
    """``[len(images), embedding_size]``, in order, as the run's evaluation embeds them."""
    in_order = ShuffledSampler(len(images), shuffle=False, rank=0, world_size=1)
    batches = image_loader(images, in_order, 64, crop=crop, transform=DeviceTransform())
    return torch.cat([model(batch) for batch, _ in batches])


def identify(checkpoint: Path, photos: Sequence[Path], gallery: Path | None, k: int) -> None:
    """Print the ``k`` images of the gallery that are most similar to each of ``photos``."""
    config = saved_configuration([f"ckpt_path={checkpoint}"])
    data = instantiate(config.data)
    crop = data.val_crop
    kind: Any = get_class(config.model._target_)
    model = kind.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    known = gallery_of(gallery or data.shards())
    encoded = [(photo.read_bytes(), photo.name) for photo in photos]
    asked = MapStyleImages(encoded, labels=[0] * len(photos))
    similarities, places = search(embeddings(model, asked, crop), embeddings(model, known, crop), k)
    for photo, values, indices in zip(photos, similarities.tolist(), places.tolist(), strict=True):
        print(photo)
        for number, (similarity, index) in enumerate(zip(values, indices, strict=True), start=1):
            label = known.classes[known.labels[index]]
            print(f"  {number}. {similarity:.3f}  {label}  {known.where(index)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python recipes/identify.py",
        description="Embed photographs with a recogniser that recipes/train.py trained, and find "
        "the most similar images of a gallery. Start it in the folder where the run was started.",
        epilog="A checkpoint names code that is run: use only those that you trust.",
    )
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/best.ckpt")
    add("photos", type=Path, nargs="+", metavar="PHOTO")
    where = "packed images, or a folder for each class (default: all packed images of the run)"
    add("--gallery", type=Path, metavar="FOLDER", help=where)
    add("-k", type=int, default=5, help="images to find (default: %(default)s)")
    options = parser.parse_args()
    try:
        identify(options.checkpoint, options.photos, options.gallery, options.k)
    except (RingError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
