"""Animals: four legs or two wings, ears, a tail, and a coat that is plain, spotted or striped."""

from __future__ import annotations

import math

from numpy.random import Generator

from recipes.catalogue.pen import Colour, Pen, colour, hsv, shade


def draw_animal(pen: Pen, traits: Generator, pose: Generator) -> None:
    """``traits`` fixes the species; ``pose`` moves legs, head and tail."""
    if traits.random() < 0.3:
        _bird(pen, traits, pose)
    else:
        _beast(pen, traits, pose)


def _coat(traits: Generator) -> Colour:
    if traits.random() < 0.5:  # browns and greys
        return hsv(traits.uniform(0.03, 0.13), traits.uniform(0.1, 0.8), traits.uniform(0.25, 0.95))
    return colour(traits, saturation=(0.3, 0.9), value=(0.4, 0.95))


def _beast(pen: Pen, traits: Generator, pose: Generator) -> None:
    coat, second = _coat(traits), _coat(traits)
    rx, ry = traits.uniform(0.19, 0.28), traits.uniform(0.1, 0.17)
    leg, thick = traits.uniform(0.12, 0.28), traits.uniform(0.03, 0.06)
    y = 0.88 - leg - ry * 0.7
    swing = pose.uniform(-0.05, 0.05)
    for index, x in enumerate((-0.75, -0.5, 0.5, 0.75)):
        foot = 0.45 + x * rx + (swing if index % 2 else -swing)
        pen.line([(0.45 + x * rx, y), (foot, 0.9)], thick, shade(coat, 0.8 if index % 2 else 0.95))
    tail, curl = traits.uniform(0.08, 0.24), traits.uniform(-0.2, 0.15) + pose.uniform(-0.04, 0.04)
    pen.line(
        [
            (0.45 - rx * 0.9, y),
            (0.45 - rx - tail * 0.5, y + curl),
            (0.45 - rx - tail * 0.6, y + curl * 2),
        ],
        traits.uniform(0.015, 0.05),
        second,
    )
    pen.ellipse(0.45, y, rx, ry, coat)
    _pattern(pen, traits, 0.45, y, rx, ry, second)
    _head(pen, traits, pose, 0.45 + rx, y - ry, coat, second)


def _pattern(
    pen: Pen, traits: Generator, x: float, y: float, rx: float, ry: float, second: Colour
) -> None:
    kind, count = traits.integers(4), int(traits.integers(4, 9))
    if kind == 1:
        size = traits.uniform(0.015, 0.04)
        for _ in range(count * 2):
            turn, reach = traits.uniform(0, 2 * math.pi), 0.8 * math.sqrt(traits.random())
            pen.ellipse(
                x + rx * reach * math.cos(turn),
                y + ry * reach * math.sin(turn),
                size,
                size * 0.8,
                second,
            )
    elif kind == 2:
        for stripe in range(count):
            at = -0.8 + 1.6 * stripe / (count - 1)
            high = ry * math.sqrt(1 - at * at)
            pen.line([(x + at * rx, y - high), (x + at * rx, y + high)], 0.022, second)
    elif kind == 3:
        pen.ellipse(x, y + ry * 0.4, rx * 0.8, ry * 0.55, second)


def _head(
    pen: Pen, traits: Generator, pose: Generator, x: float, y: float, coat: Colour, second: Colour
) -> None:
    radius, neck = traits.uniform(0.07, 0.12), traits.uniform(0.0, 0.16)
    nod = pose.uniform(-0.03, 0.03)
    hx, hy = x + 0.03 + nod, max(0.2, y - neck + nod)
    pen.line([(x - 0.06, y + 0.08), (hx, hy)], radius * 1.1, coat)
    ear, wide = traits.uniform(0.04, 0.16), traits.uniform(0.02, 0.05)
    pointed = bool(traits.integers(2))
    for side in (-1, 1):
        ex = hx + side * radius * 0.6
        if pointed:
            pen.polygon(
                [
                    (ex - wide, hy - radius * 0.5),
                    (ex + wide, hy - radius * 0.5),
                    (ex + side * 0.02, hy - radius - ear),
                ],
                second,
            )
        else:
            pen.ellipse(ex, hy - radius - ear * 0.3, wide, ear * 0.7, second)
    pen.ellipse(hx, hy, radius, radius, coat)
    snout = traits.uniform(0.03, 0.1)
    pen.ellipse(hx + radius * 0.8, hy + radius * 0.3, snout, radius * 0.45, shade(second, 1.1))
    pen.ellipse(hx + radius * 0.25, hy - radius * 0.2, 0.015, 0.018, (15, 15, 15))


def _bird(pen: Pen, traits: Generator, pose: Generator) -> None:
    coat, wing, beak = _coat(traits), _coat(traits), hsv(traits.uniform(0.0, 0.16), 0.9, 0.9)
    rx, ry = traits.uniform(0.16, 0.24), traits.uniform(0.13, 0.2)
    legs, y = traits.uniform(0.08, 0.25), 0.6 - traits.uniform(0, 0.1)
    for side in (-0.06, 0.06):
        pen.line(
            [(0.48 + side, y), (0.48 + side + pose.uniform(-0.03, 0.03), min(0.93, y + ry + legs))],
            0.018,
            beak,
        )
    tail = traits.uniform(0.1, 0.25)
    pen.polygon(
        [
            (0.48 - rx * 0.7, y - 0.03),
            (0.48 - rx - tail, y + traits.uniform(-0.15, 0.12)),
            (0.48 - rx * 0.7, y + 0.08),
        ],
        wing,
    )
    pen.ellipse(0.48, y, rx, ry, coat)
    _pattern(pen, traits, 0.48, y, rx * 0.9, ry * 0.9, wing)
    pen.ellipse(
        0.42, y + pose.uniform(-0.03, 0.02), rx * 0.65, ry * 0.5, wing, traits.uniform(-0.5, 0.3)
    )
    radius = traits.uniform(0.07, 0.11)
    hx, hy = 0.48 + rx * 0.9, y - ry - traits.uniform(0.0, 0.1) + pose.uniform(-0.02, 0.02)
    pen.line([(0.48 + rx * 0.5, y - ry * 0.4), (hx, hy)], radius * 1.2, coat)
    pen.ellipse(hx, hy, radius, radius, coat)
    long = traits.uniform(0.06, 0.2)
    pen.polygon(
        [
            (hx + radius * 0.7, hy - 0.025),
            (hx + radius + long, hy + traits.uniform(0, 0.05)),
            (hx + radius * 0.7, hy + 0.035),
        ],
        beak,
    )
    pen.ellipse(hx + radius * 0.2, hy - radius * 0.2, 0.014, 0.016, (15, 15, 15))
    if traits.random() < 0.5:
        pen.star(hx - radius * 0.2, hy - radius, traits.uniform(0.04, 0.08), 5, 0.4, wing)
