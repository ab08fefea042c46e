"""Landmarks: towers, domes, temples, bridges and stepped pyramids."""

from __future__ import annotations

import math

from numpy.random import Generator

from recipes.catalogue.pen import Colour, Pen, colour, hsv, shade


def draw_landmark(pen: Pen, traits: Generator, pose: Generator) -> None:
    """``traits`` fixes the building; ``pose`` changes nothing."""
    stone = hsv(traits.uniform(0.0, 0.16), traits.uniform(0.05, 0.6), traits.uniform(0.45, 0.95))
    if traits.random() < 0.3:
        stone = colour(traits, saturation=(0.2, 0.7))
    roof = colour(traits, value=(0.3, 0.85))
    kind = traits.integers(5)
    (_tower, _dome, _temple, _bridge, _pyramid)[kind](pen, traits, stone, roof)


def _tower(pen: Pen, traits: Generator, stone: Colour, roof: Colour) -> None:
    foot, head = traits.uniform(0.14, 0.26), traits.uniform(0.06, 0.14)
    top, levels = traits.uniform(0.22, 0.34), int(traits.integers(2, 7))
    pen.polygon(
        [(0.5 - foot, 0.95), (0.5 - head, top), (0.5 + head, top), (0.5 + foot, 0.95)], stone
    )
    for level in range(levels):
        y = top + (0.95 - top) * level / levels
        half = head + (foot - head) * level / levels
        pen.box(0.5 - half - 0.02, y, 0.5 + half + 0.02, y + 0.025, shade(stone, 0.6))
        pen.box(0.5 - half * 0.3, y + 0.045, 0.5 + half * 0.3, y + 0.09, (45, 45, 60), 0.01)
    peak = traits.uniform(0.08, 0.2)
    if traits.random() < 0.6:
        pen.polygon([(0.5 - head * 1.3, top), (0.5, top - peak), (0.5 + head * 1.3, top)], roof)
    else:
        pen.ellipse(0.5, top - peak * 0.3, head * 1.1, peak * 0.5, roof)
        pen.line([(0.5, top - peak * 0.6), (0.5, 0.05)], 0.012, shade(roof, 0.5))


def _dome(pen: Pen, traits: Generator, stone: Colour, roof: Colour) -> None:
    half, base = traits.uniform(0.22, 0.32), traits.uniform(0.52, 0.62)
    pen.ellipse(0.5, base, half * 0.8, traits.uniform(0.16, 0.3), roof)
    pen.box(0.5 - half, base, 0.5 + half, 0.93, stone)
    arches = int(traits.integers(2, 6))
    for arch in range(arches):
        x = 0.5 - half + 2 * half * (arch + 0.5) / arches
        wide = half / arches * 0.6
        pen.ellipse(x, 0.74, wide, wide, (50, 45, 55))
        pen.box(x - wide, 0.74, x + wide, 0.93, (50, 45, 55))
    if traits.random() < 0.6:
        high = traits.uniform(0.2, 0.45)
        for side in (-1, 1):
            x = 0.5 + side * (half + 0.07)
            pen.box(x - 0.03, high, x + 0.03, 0.93, shade(stone, 0.9))
            pen.polygon([(x - 0.045, high), (x, high - 0.12), (x + 0.045, high)], roof)
    pen.line([(0.5, base - 0.2), (0.5, base - 0.36)], 0.015, shade(roof, 0.6))


def _temple(pen: Pen, traits: Generator, stone: Colour, roof: Colour) -> None:
    half, top = traits.uniform(0.28, 0.42), traits.uniform(0.38, 0.5)
    columns, peak = int(traits.integers(3, 9)), traits.uniform(0.1, 0.22)
    pen.polygon([(0.5 - half - 0.04, top), (0.5, top - peak), (0.5 + half + 0.04, top)], roof)
    pen.ellipse(0.5, top - peak * 0.35, 0.035, 0.035, shade(stone, 1.2))
    pen.box(0.5 - half, top, 0.5 + half, top + 0.06, stone)
    pen.box(0.5 - half, top + 0.06, 0.5 + half, 0.86, shade(stone, 0.35))
    wide = traits.uniform(0.25, 0.5) * half / columns
    for column in range(columns):
        x = 0.5 - half + 2 * half * (column + 0.5) / columns
        pen.box(x - wide, top + 0.06, x + wide, 0.86, stone)
    for step in range(int(traits.integers(1, 4))):
        pen.box(
            0.5 - half - 0.03 * (step + 1),
            0.86 + 0.03 * step,
            0.5 + half + 0.03 * (step + 1),
            0.9 + 0.03 * step,
            shade(stone, 0.85),
        )


def _bridge(pen: Pen, traits: Generator, stone: Colour, roof: Colour) -> None:
    deck, arches = traits.uniform(0.5, 0.62), int(traits.integers(1, 6))
    if traits.random() < 0.5:  # hung from two pylons
        high = traits.uniform(0.12, 0.3)
        for side in (0.26, 0.74):
            pen.box(side - 0.025, high, side + 0.025, 0.92, roof)
        curve = [
            (0.26 + 0.48 * t / 12, high + (deck - high) * (1 - (t / 6 - 1) ** 2) * 0.9)
            for t in range(13)
        ]
        pen.line(curve, 0.016, roof)
        for x, y in curve[1:-1:2]:
            pen.line([(x, y), (x, deck)], 0.008, roof)
        pen.line([(0.02, deck), (0.26, high)], 0.014, roof)
        pen.line([(0.74, high), (0.98, deck)], 0.014, roof)
        pen.box(0.02, deck, 0.98, deck + 0.05, stone)
        return
    pen.box(0.02, deck - 0.04, 0.98, deck + 0.05, shade(stone, 0.85))
    for pillar in range(arches + 1):
        x = 0.06 + 0.88 * pillar / arches
        pen.box(x - 0.035, deck, x + 0.035, 0.92, stone)
    for arch in range(arches):
        middle, wide = 0.06 + 0.88 * (arch + 0.5) / arches, 0.44 / arches - 0.02
        rim = [
            (
                middle + wide * math.cos(math.pi * t / 14),
                deck + 0.3 - min(0.28, wide) * math.sin(math.pi * t / 14),
            )
            for t in range(15)
        ]
        pen.line(rim, 0.03, stone)


def _pyramid(pen: Pen, traits: Generator, stone: Colour, roof: Colour) -> None:
    steps, half, top = (
        int(traits.integers(2, 9)),
        traits.uniform(0.34, 0.46),
        traits.uniform(0.2, 0.45),
    )
    for step in range(steps):
        y = 0.93 - (0.93 - top) * step / steps
        wide = half * (1 - step / steps * 0.85)
        pen.box(
            0.5 - wide,
            y - (0.93 - top) / steps,
            0.5 + wide,
            y,
            shade(stone, 1.0 if step % 2 else 0.82),
        )
    stairs = traits.uniform(0.03, 0.09)
    pen.polygon(
        [
            (0.5 - stairs * 1.4, 0.93),
            (0.5 - stairs, top),
            (0.5 + stairs, top),
            (0.5 + stairs * 1.4, 0.93),
        ],
        roof,
    )
    pen.box(
        0.5 - stairs * 1.3,
        top - traits.uniform(0.06, 0.14),
        0.5 + stairs * 1.3,
        top,
        shade(roof, 0.7),
    )
