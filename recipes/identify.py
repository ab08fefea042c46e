"""Finds what is on a photograph: ``python recipes/identify.py CHECKPOINT PHOTO``, with a
recogniser of the recipes.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from matplotlib.figure import Figure  # no pyplot: it would look for a display
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
from lightning_ring.data.decoding import decode_rgb
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
    """``[len(images), embedding_size]``, in the order of ``images``, as the run's evaluation
    embeds them.
    """
    in_order = ShuffledSampler(len(images), shuffle=False, rank=0, world_size=1)
    batches = image_loader(images, in_order, 64, crop=crop, transform=DeviceTransform())
    return torch.cat([model(batch) for batch, _ in batches])


def picture_of(
    photos: Sequence[Any], answers: Sequence[Sequence[tuple[Any, str, float]]], names: Sequence[str]
) -> Figure:
    """A row for each of ``photos`` (height x width x 3): itself, then what was found, the
    most similar first.
    """
    columns = 1 + max(map(len, answers))
    figure = Figure(figsize=(1.9 * columns, 2.3 * len(photos)), dpi=120, layout="constrained")
    grid = figure.subplots(len(photos), columns, squeeze=False)
    for axes in grid.flat:
        axes.axis("off")
    for row, photo, name, found in zip(grid, photos, names, answers, strict=True):
        row[0].imshow(photo)
        row[0].set_title(name, fontsize=9)
        for axes, (image, label, similarity) in zip(row[1:], found, strict=False):
            axes.imshow(image)
            axes.set_title(f"{label}\n{similarity:.3f}", fontsize=9)
    return figure


def identify(
    checkpoint: Path, photos: Sequence[Path], gallery: Path | None, k: int, output: Path
) -> None:
    """Print the ``k`` images of the gallery that are most similar to each of ``photos``, and
    draw them.
    """
    config = saved_configuration([f"ckpt_path={checkpoint}"])
    data = instantiate(config.data)
    crop = data.val_crop
    kind: Any = get_class(config.model._target_)
    model = kind.load_from_checkpoint(checkpoint, map_location="cpu").eval()
    known = gallery_of(gallery or data.shards())
    asked = MapStyleImages(
        [(photo.read_bytes(), photo.name) for photo in photos], labels=[0] * len(photos)
    )
    similarities, places = search(embeddings(model, asked, crop), embeddings(model, known, crop), k)
    answers = []
    for photo, values, indices in zip(photos, similarities.tolist(), places.tolist(), strict=True):
        print(photo)
        for number, (similarity, index) in enumerate(zip(values, indices, strict=True), start=1):
            print(
                f"  {number}. {similarity:.3f}  {known.classes[known.labels[index]]}  "
                f"{known.where(index)}"
            )
        labels = [known.classes[known.labels[index]] for index in indices]
        answers.append(
            [
                (decode_rgb(known.read_many([i])[0]), label, value)
                for i, label, value in zip(indices, labels, values, strict=True)
            ]
        )
    shown = [decode_rgb(photo.read_bytes()) for photo in photos]
    picture_of(shown, answers, [photo.name for photo in photos]).savefig(output)
    print(f"picture: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python recipes/identify.py",
        description="Embed photographs with a recogniser that recipes/train.py trained, and find "
        "the most similar images of a gallery. Start it in the folder where the run was started.",
        epilog="A checkpoint names code that is run: use only those that you trust.",
    )
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="RUN/checkpoints/best.ckpt"
    )
    parser.add_argument("photos", type=Path, nargs="+", metavar="PHOTO")
    parser.add_argument(
        "--gallery",
        type=Path,
        metavar="FOLDER",
        help="packed images, or a folder for each class (default: all packed images of the run)",
    )
    parser.add_argument("-k", type=int, default=5, help="images to find (default: %(default)s)")
    parser.add_argument(
        "-o", "--output", type=Path, default="identified.png", help="default: %(default)s"
    )
    options = parser.parse_args()
    try:
        identify(options.checkpoint, options.photos, options.gallery, options.k, options.output)
    except (RingError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
