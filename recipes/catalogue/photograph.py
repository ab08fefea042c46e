"""A photograph of a drawn object: another view, light, background and blur each time."""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator
from PIL import Image, ImageFilter

Array = np.ndarray


def photograph(drawn: Image.Image, rng: Generator, size: int) -> Image.Image:
    """``drawn`` (square, RGBA) as seen by a camera: an RGB image of ``size`` pixels a side."""
    seen = _view(drawn, rng, size)
    alpha = np.asarray(seen.getchannel("A"), dtype=np.float32)[..., None] / 255
    picture = _background(rng, size)
    picture = picture * (1 - _shadow(seen, rng))
    picture = picture * (1 - alpha) + np.asarray(seen.convert("RGB"), dtype=np.float32) * alpha
    picture = picture * _light(rng, size)
    picture += rng.normal(0, rng.uniform(0, 7), picture.shape).astype(np.float32)
    image = Image.fromarray(picture.clip(0, 255).astype(np.uint8))
    return image.filter(ImageFilter.GaussianBlur(size / 128 * max(0.0, rng.uniform(-0.5, 1.3))))


def _view(drawn: Image.Image, rng: Generator, size: int) -> Image.Image:
    """Turned, nearer or farther, and from one side: a perspective of the square."""
    turn, scale = rng.normal(0, 0.18), rng.uniform(0.8, 1.15)
    yaw, pitch = rng.uniform(-0.22, 0.22), rng.uniform(-0.12, 0.12)
    shift = rng.uniform(-0.1, 0.1, 2)
    cos, sin = scale * math.cos(turn), scale * math.sin(turn)
    corners = []
    for x, y in ((-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)):
        depth = 1 + yaw * 2 * x + pitch * 2 * y  # the far side looks smaller
        u, v = x * (1 - abs(yaw)) / depth, y * (1 - abs(pitch)) / depth
        corners.append((0.5 + u * cos - v * sin + shift[0], 0.5 + u * sin + v * cos + shift[1]))
    coefficients = _perspective([(x * size, y * size) for x, y in corners], drawn.width)
    # premultiplied, or the transparent black around the object would bleed into its edges
    return (
        drawn.convert("RGBa")
        .transform(
            (size, size), Image.Transform.PERSPECTIVE, coefficients, Image.Resampling.BILINEAR
        )
        .convert("RGBA")
    )


def _perspective(corners: list[tuple[float, float]], side: int) -> list[float]:
    """The 8 numbers by which Pillow maps output ``corners`` onto those of a square of ``side``
    pixels.
    """
    square = ((0, 0), (side, 0), (side, side), (0, side))
    rows, values = [], []
    for (x, y), (u, v) in zip(corners, square, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    return np.linalg.solve(np.array(rows, dtype=float), np.array(values, dtype=float)).tolist()


def _background(rng: Generator, size: int) -> Array:
    """Walls, meadows, skies, tiles: smooth or ordered colours that tell nothing about the
    object.
    """
    kind = rng.integers(4)
    first, second = (_muted(rng) for _ in range(2))
    if kind == 0:
        cells = int(rng.integers(2, 24))
        field = rng.uniform(0, 1, (cells, cells))
    elif kind == 1:
        field = (
            np.linspace(0, 1, 32)[:, None].repeat(32, 1)
            if rng.random() < 0.5
            else np.linspace(0, 1, 32)[None].repeat(32, 0)
        )
    elif kind == 2:
        ramp = np.arange(48) * rng.uniform(0.2, 1.0)
        field = 0.5 + 0.5 * np.sin(
            ramp[:, None] * math.cos(turn := rng.uniform(0, math.pi)) + ramp[None] * math.sin(turn)
        )
    else:
        tiles = int(rng.integers(3, 9))
        field = np.indices((tiles, tiles)).sum(0) % 2 + rng.uniform(-0.2, 0.2, (tiles, tiles))
    how = Image.Resampling.NEAREST if kind == 3 else Image.Resampling.BICUBIC
    field = np.asarray(Image.fromarray(field.astype(np.float32)).resize((size, size), how))[
        ..., None
    ]
    return (first * field + second * (1 - field)).astype(np.float32)


def _muted(rng: Generator) -> Array:
    """A colour somewhat closer to grey than the objects' are."""
    colour = rng.uniform(30, 235, 3)
    return colour + rng.uniform(0, 0.8) * (colour.mean() - colour)


def _shadow(seen: Image.Image, rng: Generator) -> Array:
    strength, size = rng.uniform(0, 0.6), seen.width
    alpha = seen.getchannel("A").filter(ImageFilter.GaussianBlur(size * rng.uniform(0.01, 0.05)))
    offset = [round(size * part) for part in rng.uniform(-0.06, 0.06, 2)]
    return (
        np.roll(np.asarray(alpha, dtype=np.float32), offset, axis=(0, 1))[..., None]
        / 255
        * strength
    )


def _light(rng: Generator, size: int) -> Array:
    """Exposure, the colour of the light, and where it comes from."""
    turn, fall = rng.uniform(0, 2 * math.pi), rng.uniform(0, 0.35)
    grid = np.linspace(-1, 1, size, dtype=np.float32)
    slope = 1 + fall * (grid[:, None] * math.sin(turn) + grid[None] * math.cos(turn)) / 1.41
    warm = rng.uniform(-0.12, 0.12)
    tint = np.array([1 + warm, 1, 1 - warm], dtype=np.float32)
    return (rng.uniform(0.65, 1.25) * slope[..., None] * tint).astype(np.float32)
