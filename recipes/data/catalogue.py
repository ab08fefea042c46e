"""A catalogue of drawn things as packed images, made by the first run that needs it.

A class is a thing with a shape, colours, a pattern, parts around it and an emblem, all drawn from
its number. A photograph shows it turned, nearer or farther, in another light, and before another
background. The same arguments give the same bytes.
"""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from numpy.random import Generator
from PIL import Image, ImageDraw, ImageFilter

from lightning_ring.data.packing.image import PackSettings
from lightning_ring.data.packing.run import pack
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.cores import available_cores
from recipes.data.shards import MANIFEST, Shards

SPLITS = ("train", "val", "test", "unseen")
RECORD = "catalogue.json"
CANVAS = 192  # pixels a side of a drawing, before it is photographed

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Catalogue:
    """How many classes and photographs, and of what size.

    The photographs of ``seen`` classes are split into ``train``, ``val`` and ``test``; ``unseen``
    classes are never trained on. Training classes have from ``most`` down to ``fewest``
    photographs, in a geometric row. ``size`` is in pixels a side. Another seed is another
    catalogue.
    """

    seen: int = 110
    unseen: int = 40
    most: int = 100
    fewest: int = 5
    val_photographs: int = 10
    test_photographs: int = 10
    unseen_photographs: int = 20
    size: int = 96
    seed: int = 0


def photographs(catalogue: Catalogue) -> Iterator[tuple[str, int, int]]:
    """Split, class and view of every file. No view of a class is in two splits."""
    shrink = (catalogue.fewest / catalogue.most) ** (1 / max(1, catalogue.seen - 1))
    for thing in range(catalogue.seen):
        counts = (
            ("train", 0, round(catalogue.most * shrink**thing)),
            ("val", 10_000, catalogue.val_photographs),
            ("test", 20_000, catalogue.test_photographs),
        )
        for split, first, count in counts:
            yield from ((split, thing, first + view) for view in range(count))
    for thing in range(catalogue.seen, catalogue.seen + catalogue.unseen):
        yield from (("unseen", thing, view) for view in range(catalogue.unseen_photographs))


def draw(traits: Generator) -> Image.Image:
    """A thing on a transparent canvas."""
    image = Image.new("RGBA", (CANVAS, CANVAS))
    pen = ImageDraw.Draw(image)
    body, second, third = (tuple(traits.integers(20, 256, 3).tolist()) for _ in range(3))
    for _ in range(int(traits.integers(1, 4))):  # parts that stick out
        turn = traits.uniform(0, 6.3)
        wide, long = traits.uniform(0.1, 0.5), traits.uniform(0.3, 0.5)
        for part in range(int(traits.integers(1, 5))):
            middle = turn + part * traits.uniform(0.6, 1.6)
            corners = [(0.1, middle - wide), (long, middle), (0.1, middle + wide)]
            pen.polygon(placed([polar(*corner) for corner in corners]), second)
    outline = rounded(traits, int(traits.integers(3, 9)))
    mask = Image.new("L", image.size)
    ImageDraw.Draw(mask).polygon(placed(outline), fill=255)
    image.paste(pattern(traits, body, third), mask=mask)
    tips, size = int(traits.integers(3, 8)), traits.uniform(0.06, 0.13)
    radii = [size, size * traits.uniform(0.3, 1)] * tips
    star = [polar(radius, math.pi * step / tips) for step, radius in enumerate(radii)]
    x, y = traits.uniform(-0.12, 0.12, 2)
    pen.polygon(placed([(u + x, v + y) for u, v in star]), second)
    return image


def rounded(traits: Generator, corners: int) -> Points:
    """A closed curve through as many waves as it has corners."""
    wide, high = traits.uniform(0.18, 0.38, 2)
    depth, phase = traits.uniform(0, 0.3), traits.uniform(0, 6.3)
    turns = [2 * math.pi * step / 90 for step in range(90)]
    radii = [1 + depth * math.sin(corners * turn + phase) for turn in turns]
    around = [polar(radius, turn) for radius, turn in zip(radii, turns, strict=True)]
    return [(wide * x, high * y) for x, y in around]


def pattern(traits: Generator, body: Any, other: Any) -> Image.Image:
    """The whole canvas: plain, with stripes, with spots, or with a band."""
    image = Image.new("RGBA", (CANVAS, CANVAS), body)
    pen = ImageDraw.Draw(image)
    kind, count = int(traits.integers(4)), int(traits.integers(4, 14))
    step, slope = CANVAS / count, traits.uniform(-40, 40)
    if kind == 1:
        for stripe in range(-2, count + 2):
            pen.line([(stripe * step, 0), (stripe * step + slope, CANVAS)], other, int(step / 2))
    elif kind == 2:
        for x, y in traits.uniform(0.2, 0.8, (3 * count, 2)) * CANVAS:
            pen.ellipse((x, y, x + step / 2, y + step / 2), other)
    elif kind == 3:
        top, tall = traits.uniform(0.3, 0.6, 2) * CANVAS
        pen.rectangle((0, top, CANVAS, top + tall / 3), other)
    return image


def polar(radius: float, turn: float) -> tuple[float, float]:
    return radius * math.cos(turn), radius * math.sin(turn)


def placed(points: Points) -> list[tuple[float, float]]:
    """Pixels of points around the middle, which are up to 0.5 away."""
    return [((0.5 + x) * CANVAS, (0.5 + y) * CANVAS) for x, y in points]


def photograph(drawn: Image.Image, pose: Generator, size: int) -> Image.Image:
    """``drawn`` as a camera sees it."""
    cos, sin = polar(1 / pose.uniform(0.65, 1.05), pose.normal(0, 0.25))
    shear, (left, top) = pose.uniform(-0.2, 0.2), pose.uniform(-0.12, 0.12, 2) + 0.5
    rows = np.array([[cos, sin + shear], [-sin, cos]]) * CANVAS / size
    shift = CANVAS / 2 - rows @ (size * np.array([left, top]))
    affine = (*rows[0], shift[0], *rows[1], shift[1])
    seen = drawn.transform((size, size), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    cells = int(pose.integers(2, 16))
    shades = pose.integers(30, 235, (cells, cells, 3)) // 4 + pose.integers(0, 190, 3)
    field = Image.fromarray(shades.astype(np.uint8))
    scene = field.resize(seen.size, Image.Resampling.BICUBIC)
    scene.paste(seen, mask=seen.getchannel("A"))
    fall = 1 + np.linspace(-0.3, 0.3, size)[:, None, None] * pose.uniform(-1, 1)
    tint = pose.uniform(0.6, 1.2) + pose.uniform(-0.1, 0.1, 3)
    pixels = np.asarray(scene) * tint * fall + pose.normal(0, 5, (size, size, 3))
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    return image.filter(ImageFilter.GaussianBlur(size / 128 * pose.uniform(0, 1.2)))


def take(folder: Path, catalogue: Catalogue, which: tuple[str, int, int]) -> None:
    split, thing, view = which
    drawn = draw(np.random.default_rng([catalogue.seed, thing]))
    pose = np.random.default_rng([catalogue.seed, thing, view + 1])
    file = folder / split / f"thing_{thing:03d}" / f"{view:05d}.jpg"
    photograph(drawn, pose, catalogue.size).save(file, quality=int(pose.integers(60, 96)))


def make_catalogue(folder: Path, catalogue: Catalogue) -> None:
    """Make it in ``folder`` unless it is there. An interrupted call leaves no half of it.

    Raises `ConfigurationError`: ``folder`` holds something else.
    """
    wanted, record = asdict(catalogue), folder / RECORD
    if folder.exists():
        found = json.loads(record.read_text()) if record.is_file() else None
        if found != wanted:
            raise ConfigurationError(
                f"{folder} holds {found or 'something that is not a catalogue'}, expected "
                f"{wanted}. Move it away, or name another folder."
            )
        return
    rank_zero_info(f"drawing and photographing the catalogue in {folder}")
    unfinished = folder.with_name(f"{folder.name}.unfinished-{os.getpid()}")
    todo = list(photographs(catalogue))
    try:
        for split, thing in {(split, thing) for split, thing, _ in todo}:
            (unfinished / split / f"thing_{thing:03d}").mkdir(parents=True)
        Image.init()  # once, here: threads that load Pillow's plugins disturb each other
        with ThreadPoolExecutor(available_cores()) as pool:
            list(pool.map(partial(take, unfinished, catalogue), todo))
        (unfinished / RECORD).write_text(json.dumps(wanted))
        try:
            unfinished.rename(folder)
        except OSError:
            if not record.is_file():  # else another node made it meanwhile
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


class CatalogueShards(Shards):
    """Makes the catalogue in ``folder``, and its ``shards`` inside, unless it is there.

    ``drawing`` holds arguments of `Catalogue`; ``options`` are those of `Shards`.
    """

    def __init__(self, folder: str, drawing: dict[str, Any] | None = None, **options: Any) -> None:
        super().__init__(folder, **options)
        self.catalogue = Catalogue(**(drawing or {}))

    def shards(self) -> Path:
        return self.folder / "shards"

    def prepare_data(self) -> None:
        make_catalogue(self.folder, self.catalogue)
        for split in SPLITS:
            packed = self.shards() / split
            if not (packed / MANIFEST).exists():
                settings, cores = PackSettings(), available_cores()
                pack(self.folder / split, packed, settings, cores, lambda *_: None)
