"""Names of classes become numbers."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from pathlib import Path

from lightning_ring.errors import ConfigurationError


def sorted_classes(names: Iterable[str], source: Path) -> list[str]:
    """Classes in the order of their numbers: sorted as ImageFolder sorts them, or by value if all are numbers.

    So labels 0, 1, ..., 10 of a CSV stay what they are.

    Raises:
        ConfigurationError: Two names that people read as one: "cat" and "Cat", "1" and "01", or one accent written
            in two ways.
    """
    names = list(names)
    numbers = all(name.isdecimal() and name.isascii() for name in names)
    same: dict[str, str] = {}
    for name in names:
        plain = str(int(name)) if numbers else unicodedata.normalize("NFC", name).strip().casefold()
        if plain in same:
            raise ConfigurationError(
                f"{source} has two classes of one name, {same[plain]!r} and {name!r}. Put their images into one class, "
                "or rename one of them."
            )
        same[plain] = name
    if numbers:
        return sorted(names, key=int)
    return sorted(names)
