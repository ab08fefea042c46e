"""Filled shapes on a transparent canvas, in coordinates from 0 (left, top) to 1, whatever the
canvas measures.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence

from numpy.random import Generator
from PIL import Image, ImageDraw

Colour = tuple[int, int, int]
Point = tuple[float, float]


class Pen:
    """Draws on a square RGBA image of ``size`` pixels a side, which it makes."""

    def __init__(self, size: int) -> None:
        self.image = Image.new("RGBA", (size, size), (0, 0, 0, 0))
        self._draw = ImageDraw.Draw(self.image)
        self._size = size

    def polygon(self, points: Sequence[Point], colour: Colour) -> None:
        self._draw.polygon([(x * self._size, y * self._size) for x, y in points], fill=colour)

    def ellipse(
        self, x: float, y: float, rx: float, ry: float, colour: Colour, turn: float = 0.0
    ) -> None:
        """An ellipse around (x, y), turned by ``turn`` radians."""
        cos, sin = math.cos(turn), math.sin(turn)
        steps = (2 * math.pi * step / 28 for step in range(28))
        around = ((rx * math.cos(step), ry * math.sin(step)) for step in steps)
        self.polygon([(x + u * cos - v * sin, y + u * sin + v * cos) for u, v in around], colour)

    def box(
        self,
        left: float,
        top: float,
        right: float,
        bottom: float,
        colour: Colour,
        round_by: float = 0.0,
    ) -> None:
        corners = [left * self._size, top * self._size, right * self._size, bottom * self._size]
        self._draw.rounded_rectangle(corners, radius=round_by * self._size, fill=colour)

    def line(self, points: Sequence[Point], width: float, colour: Colour) -> None:
        scaled = [(x * self._size, y * self._size) for x, y in points]
        self._draw.line(scaled, fill=colour, width=max(1, round(width * self._size)), joint="curve")

    def star(
        self, x: float, y: float, radius: float, tips: int, inner: float, colour: Colour
    ) -> None:
        """A star of ``tips`` tips, whose notches lie at ``inner`` times the radius: 1 makes it a
        polygon.
        """
        radii = [radius, radius * inner] * tips
        turns = [math.pi * (step / tips - 0.5) for step in range(2 * tips)]
        ends = zip(radii, turns, strict=True)
        self.polygon([(x + r * math.cos(turn), y + r * math.sin(turn)) for r, turn in ends], colour)


def colour(
    rng: Generator,
    *,
    saturation: tuple[float, float] = (0.45, 1.0),
    value: tuple[float, float] = (0.35, 1.0),
) -> Colour:
    return hsv(rng.random(), rng.uniform(*saturation), rng.uniform(*value))


def hsv(hue: float, saturation: float, value: float) -> Colour:
    red, green, blue = colorsys.hsv_to_rgb(hue % 1, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def shade(of: Colour, factor: float) -> Colour:
    """Darker below 1, lighter above."""
    red, green, blue = (min(255, round(part * factor)) for part in of)
    return red, green, blue
