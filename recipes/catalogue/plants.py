"""Plants: a flower or fruits on a stem, with leaves in pairs or alternating."""

from __future__ import annotations

import math

from numpy.random import Generator

from recipes.catalogue.pen import Colour, Pen, colour, hsv, shade


def draw_plant(pen: Pen, traits: Generator, pose: Generator) -> None:
    """``traits`` fixes the species; ``pose`` bends the stem and turns the flower."""
    green = hsv(traits.uniform(0.2, 0.45), traits.uniform(0.4, 0.9), traits.uniform(0.25, 0.7))
    bend = pose.uniform(-0.1, 0.1)
    crown = traits.uniform(0.24, 0.36)
    pen.line(
        [(0.5, 0.95), (0.5 + bend * 0.4, 0.7), (0.5 + bend, crown)],
        traits.uniform(0.015, 0.04),
        shade(green, 0.8),
    )
    _leaves(pen, traits, bend, crown, green)
    kind = traits.integers(3)
    (_flower, _fruits, _spike)[kind](pen, traits, pose, 0.5 + bend, crown)


def _leaves(pen: Pen, traits: Generator, bend: float, crown: float, green: Colour) -> None:
    count = int(traits.integers(2, 6))
    long, wide = traits.uniform(0.12, 0.24), traits.uniform(0.02, 0.08)
    rise, paired = traits.uniform(0.1, 0.9), bool(traits.integers(2))
    vein = shade(green, 1.4)
    for leaf in range(count):
        y = 0.88 - (0.8 - crown) * leaf / count
        x = 0.5 + bend * (0.95 - y)
        for side in (-1, 1) if paired else ((-1, 1)[leaf % 2],):
            turn = -rise if side > 0 else math.pi + rise
            cx, cy = x + long * math.cos(turn), y + long * math.sin(turn)
            pen.ellipse(cx, cy, long, wide, green, turn)
            pen.line([(x, y), (x + 1.8 * (cx - x), y + 1.8 * (cy - y))], 0.008, vein)


def _flower(pen: Pen, traits: Generator, pose: Generator, x: float, y: float) -> None:
    petals, petal = (
        int(traits.integers(4, 13)),
        colour(traits, saturation=(0.5, 1.0), value=(0.6, 1.0)),
    )
    long, wide = traits.uniform(0.08, 0.13), traits.uniform(0.025, 0.06)
    first = pose.uniform(0, math.pi)
    for layer in range(int(traits.integers(1, 3))):
        for index in range(petals):
            turn = first + layer * math.pi / petals + 2 * math.pi * index / petals
            reach = long * (1 - 0.35 * layer)
            pen.ellipse(
                x + reach * math.cos(turn),
                y + reach * math.sin(turn),
                reach,
                wide,
                shade(petal, 1 - 0.25 * layer),
                turn,
            )
    heart = traits.uniform(0.03, 0.07)
    pen.ellipse(x, y, heart, heart, colour(traits, value=(0.2, 1.0)))


def _fruits(pen: Pen, traits: Generator, pose: Generator, x: float, y: float) -> None:
    fruit, count = (
        colour(traits, saturation=(0.7, 1.0), value=(0.5, 1.0)),
        int(traits.integers(1, 6)),
    )
    rx, ry = traits.uniform(0.045, 0.09), traits.uniform(0.045, 0.1)
    for index in range(count):
        turn = 2 * math.pi * index / count + pose.uniform(-0.2, 0.2)
        cx, cy = (x, y) if count == 1 else (x + 0.11 * math.cos(turn), y + 0.09 * math.sin(turn))
        pen.ellipse(cx, cy, rx, ry, fruit)
        pen.ellipse(cx - rx * 0.35, cy - ry * 0.35, rx * 0.25, ry * 0.25, shade(fruit, 1.5))


def _spike(pen: Pen, traits: Generator, pose: Generator, x: float, y: float) -> None:
    blossom, rows = colour(traits, value=(0.5, 1.0)), int(traits.integers(4, 9))
    size, wide = traits.uniform(0.018, 0.032), traits.uniform(0.03, 0.08)
    for row in range(rows):
        height = y + 0.17 - 0.3 * row / rows
        narrow = wide * (1 - row / (rows + 2))
        for side in (-1.0, 0.0, 1.0):
            pen.ellipse(
                x + side * narrow, height, size, size * 1.3, shade(blossom, 1 - 0.2 * abs(side))
            )
