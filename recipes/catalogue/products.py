"""Products: bottles, cans, boxes, jars and tubes with a label, an emblem and lines of print."""

from __future__ import annotations

from numpy.random import Generator

from recipes.catalogue.pen import Colour, Pen, colour, shade


def draw_product(pen: Pen, traits: Generator, pose: Generator) -> None:
    """``traits`` fixes what the product is; ``pose`` changes nothing: products do not move."""
    body, label, print_ = colour(traits), colour(traits), colour(traits, value=(0.1, 0.5))
    kind = traits.integers(5)
    half = traits.uniform(0.16, 0.3)
    top = traits.uniform(0.12, 0.3)
    shape = (_bottle, _can, _box, _jar, _tube)[kind]
    shape(pen, traits, half, top, body)
    _label(pen, traits, half, label, print_)


def _bottle(pen: Pen, traits: Generator, half: float, top: float, body: Colour) -> None:
    neck, shoulder = half * traits.uniform(0.25, 0.5), top + traits.uniform(0.15, 0.25)
    pen.box(0.5 - half, shoulder, 0.5 + half, 0.93, body, 0.04)
    pen.polygon(
        [
            (0.5 - half, shoulder + 0.04),
            (0.5 - neck, top),
            (0.5 + neck, top),
            (0.5 + half, shoulder + 0.04),
        ],
        body,
    )
    pen.box(0.5 - neck, top - 0.08, 0.5 + neck, top + 0.04, colour(traits), 0.01)


def _can(pen: Pen, traits: Generator, half: float, top: float, body: Colour) -> None:
    pen.box(0.5 - half, top, 0.5 + half, 0.9, body, 0.02)
    pen.ellipse(0.5, 0.9, half, 0.04, shade(body, 0.7))
    pen.ellipse(0.5, top, half, 0.05, (200, 200, 205))
    pen.ellipse(0.5, top, half * 0.8, 0.035, (150, 150, 155))


def _box(pen: Pen, traits: Generator, half: float, top: float, body: Colour) -> None:
    depth = traits.uniform(0.06, 0.14)
    pen.polygon(
        [
            (0.5 - half, top),
            (0.5 - half + depth, top - depth),
            (0.5 + half + depth, top - depth),
            (0.5 + half, top),
        ],
        shade(body, 1.25),
    )
    pen.polygon(
        [
            (0.5 + half, top),
            (0.5 + half + depth, top - depth),
            (0.5 + half + depth, 0.9 - depth),
            (0.5 + half, 0.9),
        ],
        shade(body, 0.65),
    )
    pen.box(0.5 - half, top, 0.5 + half, 0.9, body)


def _jar(pen: Pen, traits: Generator, half: float, top: float, body: Colour) -> None:
    pen.box(0.5 - half * 1.2, top + 0.1, 0.5 + half * 1.2, 0.88, body, 0.1)
    pen.box(0.5 - half, top, 0.5 + half, top + 0.13, colour(traits), 0.02)


def _tube(pen: Pen, traits: Generator, half: float, top: float, body: Colour) -> None:
    pen.polygon(
        [
            (0.5 - half, top),
            (0.5 + half, top),
            (0.5 + half * 0.75, 0.82),
            (0.5 - half * 0.75, 0.82),
        ],
        body,
    )
    pen.box(0.5 - half * 0.5, 0.8, 0.5 + half * 0.5, 0.93, colour(traits), 0.01)


def _label(pen: Pen, traits: Generator, half: float, label: Colour, print_: Colour) -> None:
    upper = traits.uniform(0.45, 0.55)
    lower = upper + traits.uniform(0.18, 0.3)
    inset = traits.choice([0.0, 0.03])
    pen.box(0.5 - half + inset, upper, 0.5 + half - inset, lower, label, traits.choice([0.0, 0.03]))
    x, y = 0.5 + traits.uniform(-0.4, 0.4) * half, upper + 0.09
    tips, inner = int(traits.integers(3, 9)), traits.choice([0.45, 0.7, 1.0])
    pen.star(x, y, traits.uniform(0.05, 0.08), tips, inner, colour(traits))
    for row in range(int(traits.integers(1, 4))):
        length = traits.uniform(0.4, 1.6) * half
        line = lower - 0.025 - 0.035 * row
        pen.line([(0.5 - length / 2, line), (0.5 + length / 2, line)], 0.014, print_)
