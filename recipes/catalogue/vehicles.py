"""Vehicles: cars, vans, buses, lorries and boats, from the side."""

from __future__ import annotations

from numpy.random import Generator

from recipes.catalogue.pen import Colour, Pen, colour, shade

GLASS = (165, 200, 220)


def draw_vehicle(pen: Pen, traits: Generator, pose: Generator) -> None:
    """``traits`` fixes the model; ``pose`` changes nothing."""
    paint, second = colour(traits), colour(traits)
    kind = traits.integers(5)
    (_car, _van, _bus, _lorry, _boat)[kind](pen, traits, paint, second)


def _wheels(pen: Pen, traits: Generator, places: list[float], y: float) -> None:
    radius, rim = traits.uniform(0.06, 0.1), colour(traits, saturation=(0.0, 0.6), value=(0.5, 1.0))
    for x in places:
        pen.ellipse(x, y, radius, radius, (25, 25, 28))
        pen.ellipse(x, y, radius * 0.55, radius * 0.55, rim)


def _stripe(
    pen: Pen, traits: Generator, left: float, right: float, y: float, second: Colour
) -> None:
    style, width = traits.integers(3), traits.uniform(0.015, 0.05)
    if style == 1:
        pen.box(left, y - width / 2, right, y + width / 2, second)
    elif style == 2:
        x = traits.uniform(left + 0.1, right - 0.1)
        pen.star(x, y, width + 0.03, int(traits.integers(3, 8)), traits.choice([0.5, 1.0]), second)


def _car(pen: Pen, traits: Generator, paint: Colour, second: Colour) -> None:
    roof, high = traits.uniform(0.36, 0.48), traits.uniform(0.56, 0.62)
    front, back = traits.uniform(0.55, 0.72), traits.uniform(0.2, 0.36)
    hood, trunk = traits.uniform(0.7, 0.82), traits.uniform(0.1, 0.22)
    pen.polygon(
        [(trunk, high), (back, roof), (front, roof), (hood, high)],
        second if traits.random() < 0.3 else paint,
    )
    pen.polygon(
        [
            (trunk + 0.06, high),
            (back + 0.03, roof + 0.03),
            ((back + front) / 2 - 0.01, roof + 0.03),
            ((back + front) / 2 - 0.01, high),
        ],
        GLASS,
    )
    pen.polygon(
        [
            ((back + front) / 2 + 0.02, high),
            ((back + front) / 2 + 0.02, roof + 0.03),
            (front - 0.02, roof + 0.03),
            (hood - 0.06, high),
        ],
        GLASS,
    )
    pen.box(0.06, high, 0.94, 0.77, paint, traits.uniform(0.02, 0.08))
    _stripe(pen, traits, 0.08, 0.92, (high + 0.77) / 2, second)
    pen.ellipse(0.92, high + 0.06, 0.02, 0.025, (250, 240, 170))
    _wheels(pen, traits, [traits.uniform(0.2, 0.28), traits.uniform(0.7, 0.8)], 0.77)


def _van(pen: Pen, traits: Generator, paint: Colour, second: Colour) -> None:
    roof, nose = traits.uniform(0.28, 0.4), traits.uniform(0.72, 0.84)
    pen.polygon([(0.06, roof), (nose, roof), (0.94, 0.56), (0.94, 0.76), (0.06, 0.76)], paint)
    pen.polygon(
        [(nose - 0.12, roof + 0.05), (nose - 0.01, roof + 0.05), (0.9, 0.54), (nose - 0.12, 0.54)],
        GLASS,
    )
    if traits.random() < 0.5:
        pen.box(0.12, roof + 0.06, nose - 0.2, 0.52, second, 0.02)
    _stripe(pen, traits, 0.06, 0.94, 0.65, second)
    _wheels(pen, traits, [0.23, 0.76], 0.77)


def _bus(pen: Pen, traits: Generator, paint: Colour, second: Colour) -> None:
    decks, roof = int(traits.integers(1, 3)), traits.uniform(0.36, 0.42)
    roof -= 0.16 * (decks - 1)
    pen.box(0.04, roof, 0.96, 0.77, paint, 0.03)
    count = int(traits.integers(3, 8))
    for deck in range(decks):
        for window in range(count):
            left = 0.08 + 0.84 * window / count
            pen.box(
                left,
                roof + 0.05 + 0.18 * deck,
                left + 0.84 / count - 0.02,
                roof + 0.15 + 0.18 * deck,
                GLASS,
                0.01,
            )
    _stripe(pen, traits, 0.04, 0.96, 0.68, second)
    _wheels(pen, traits, [0.2, 0.8] if traits.random() < 0.6 else [0.18, 0.7, 0.84], 0.78)


def _lorry(pen: Pen, traits: Generator, paint: Colour, second: Colour) -> None:
    cab, top = traits.uniform(0.66, 0.74), traits.uniform(0.26, 0.4)
    load = colour(traits)
    pen.box(0.04, top, cab - 0.02, 0.7, load)
    if traits.random() < 0.5:
        for rib in range(int(traits.integers(3, 7))):
            x = 0.09 + 0.09 * rib
            pen.line([(x, top), (x, 0.7)], 0.012, shade(load, 0.7))
    else:
        pen.star(
            0.35,
            (top + 0.7) / 2,
            0.11,
            int(traits.integers(3, 9)),
            traits.choice([0.4, 0.6, 1.0]),
            second,
        )
    pen.box(cab, traits.uniform(0.4, 0.5), 0.95, 0.75, paint, 0.03)
    pen.box(cab + 0.1, 0.5, 0.93, 0.6, GLASS, 0.01)
    pen.box(0.04, 0.7, 0.95, 0.75, (60, 60, 65))
    _wheels(pen, traits, [0.16, 0.3, 0.82], 0.78)


def _boat(pen: Pen, traits: Generator, paint: Colour, second: Colour) -> None:
    deck, bow = traits.uniform(0.58, 0.66), traits.uniform(0.03, 0.12)
    pen.polygon([(0.05, deck), (0.97, deck), (0.97 - bow - 0.1, 0.84), (0.05 + bow, 0.84)], paint)
    pen.polygon(
        [(0.08, deck + 0.1), (0.93, deck + 0.1), (0.91, deck + 0.14), (0.09, deck + 0.14)], second
    )
    if traits.random() < 0.5:  # sails
        mast, high = traits.uniform(0.4, 0.6), traits.uniform(0.1, 0.22)
        pen.line([(mast, deck), (mast, high)], 0.02, (90, 60, 40))
        pen.polygon(
            [(mast + 0.02, high), (mast + 0.02, deck - 0.04), (0.9, deck - 0.04)],
            colour(traits, saturation=(0.0, 0.8), value=(0.7, 1.0)),
        )
        pen.polygon(
            [(mast - 0.02, high + 0.06), (mast - 0.02, deck - 0.04), (0.14, deck - 0.04)],
            colour(traits, saturation=(0.0, 0.8), value=(0.7, 1.0)),
        )
    else:
        left = traits.uniform(0.2, 0.35)
        pen.box(left, deck - 0.14, 0.75, deck, (235, 235, 235), 0.02)
        for window in range(int(traits.integers(2, 5))):
            pen.ellipse(left + 0.07 + 0.11 * window, deck - 0.07, 0.03, 0.03, GLASS)
        funnel = traits.uniform(0.4, 0.6)
        pen.box(funnel, deck - 0.32, funnel + traits.uniform(0.07, 0.14), deck - 0.13, second, 0.01)
        pen.box(funnel, deck - 0.27, funnel + 0.08, deck - 0.24, paint)
