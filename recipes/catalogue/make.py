"""Draws the catalogue and photographs it: JPEGs on disk, a folder a class, the same bytes for
the same arguments.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.random import Generator
from PIL import Image

from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores
from recipes.catalogue.animals import draw_animal
from recipes.catalogue.landmarks import draw_landmark
from recipes.catalogue.pen import Pen
from recipes.catalogue.photograph import photograph
from recipes.catalogue.plants import draw_plant
from recipes.catalogue.products import draw_product
from recipes.catalogue.vehicles import draw_vehicle

FAMILIES: dict[str, Callable[[Pen, Generator, Generator], None]] = {
    "product": draw_product,
    "plant": draw_plant,
    "animal": draw_animal,
    "vehicle": draw_vehicle,
    "landmark": draw_landmark,
}
SPLITS = ("train", "val", "test", "unseen")
SUPERSAMPLING = 2
RECORD = "catalogue.json"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """How many classes and photographs, and of what size.

    Each family has ``seen`` classes, whose photographs are split into ``train``, ``val`` and
    ``test``, and ``unseen`` classes that are never trained on. Training classes have from ``most``
    down to ``fewest`` photographs, in a geometric row that runs through all families alike: the
    rare ones are what balanced sampling is for.

    Attributes:
        size: Pixels a side of a photograph.
        quality: Lowest and highest JPEG quality; each photograph has its own.
        seed: Another seed is another catalogue.
    """

    seen: int = 22
    unseen: int = 8
    most: int = 100
    fewest: int = 5
    val_photographs: int = 10
    test_photographs: int = 10
    unseen_photographs: int = 20
    size: int = 96
    quality: tuple[int, int] = (60, 95)
    seed: int = 0

    def __post_init__(self) -> None:
        photographs = (
            self.fewest,
            self.val_photographs,
            self.test_photographs,
            self.unseen_photographs,
        )
        if min(self.seen, self.unseen, *photographs) < 1:
            raise ConfigurationError(
                f"a catalogue needs at least one class and photograph of each kind, got {self}."
            )
        if self.most < self.fewest or self.size < 16:
            raise ConfigurationError(
                f"a catalogue needs most >= fewest and a size of at least 16 pixels, got {self}."
            )


@dataclass(frozen=True, slots=True)
class Photograph:
    """One file to make. ``number`` is the class's number within its family."""

    split: str
    family: str
    number: int
    view: int

    @property
    def path(self) -> Path:
        return Path(self.split) / f"{self.family}_{self.number:02d}" / f"{self.view:04d}.jpg"


def make_catalogue(folder: Path, catalogue: Catalogue, num_workers: int | None = None) -> Path:
    """Make it in ``folder`` unless it is there; returns ``folder``, which holds a folder each for
    `SPLITS`.

    Work happens beside the folder, which appears when all is done: an interrupted call leaves no
    half of a catalogue.

    Args:
        folder: Where to, such as ``data/catalogue``.
        catalogue: What.
        num_workers: Processes; all cores that this process may use by default.

    Raises:
        ConfigurationError: ``folder`` holds another catalogue, or something else.
    """
    record = json.loads(json.dumps(asdict(catalogue)))
    if folder.exists():
        found = json.loads((folder / RECORD).read_text()) if (folder / RECORD).is_file() else None
        if found != record:
            what = "another catalogue" if found else "something that is not a catalogue"
            raise ConfigurationError(
                f"{folder} holds {what}. Move it away, or name another folder. Found {found}, want "
                f"{record}"
            )
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    todo = list(photographs(catalogue))
    for parent in sorted({unfinished / photo.path.parent for photo in todo}):
        parent.mkdir(parents=True)
    try:
        workers = num_workers or available_cores()
        batches = list(_batches([(unfinished, catalogue, photo) for photo in todo], 64))
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            pool.map(_take_all, batches, chunksize=1)
        (unfinished / RECORD).write_text(json.dumps(record))
        try:
            unfinished.rename(folder)
        except OSError:
            if not (folder / RECORD).is_file():  # else another process made it meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def photographs(catalogue: Catalogue) -> Iterator[Photograph]:
    """Every file of ``catalogue``."""
    classes = [(family, number) for number in range(catalogue.seen) for family in FAMILIES]
    shrink = (catalogue.fewest / catalogue.most) ** (1 / max(1, len(classes) - 1))
    for position, (family, number) in enumerate(classes):
        for view in range(round(catalogue.most * shrink**position)):
            yield Photograph("train", family, number, view)
        # views of its own: no photograph is in two splits
        for view in range(catalogue.val_photographs):
            yield Photograph("val", family, number, 10_000 + view)
        for view in range(catalogue.test_photographs):
            yield Photograph("test", family, number, 20_000 + view)
    for number in range(catalogue.seen, catalogue.seen + catalogue.unseen):
        for family in FAMILIES:
            for view in range(catalogue.unseen_photographs):
                yield Photograph("unseen", family, number, view)


def take(catalogue: Catalogue, photo: Photograph) -> tuple[Image.Image, int]:
    """The picture, and the JPEG quality it is saved with."""
    family = list(FAMILIES).index(photo.family)
    traits = np.random.default_rng([catalogue.seed, family, photo.number])
    pose = np.random.default_rng([catalogue.seed, family, photo.number, photo.view + 1])
    pen = Pen(SUPERSAMPLING * catalogue.size)
    FAMILIES[photo.family](pen, traits, pose)
    return photograph(pen.image, pose, catalogue.size), int(
        pose.integers(*catalogue.quality, endpoint=True)
    )


def _take_all(batch: list[tuple[Path, Catalogue, Photograph]]) -> None:
    for folder, catalogue, photo in batch:
        picture, quality = take(catalogue, photo)
        picture.save(folder / photo.path, quality=quality)


def _batches(items: list, size: int) -> Iterator[list]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
