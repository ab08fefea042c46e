"""Images that are in several of the sets that are merged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from lightning_ring.data.sets.rows import SetRows
from lightning_ring.errors import ConfigurationError


def without_repeated(parts: Sequence[SetRows], deleted: Collection[bytes]) -> list[SetRows]:
    """``parts`` without images that an earlier part has. All parts but the first also lose names that are ``deleted``.

    A part without any image left is left out.

    Raises:
        ConfigurationError: Two parts have different images of one name.
    """
    hashes = np.concatenate(
        [np.fromiter((hash(name) for name in names_of(part)), np.int64, len(part)) for part in parts]
    )
    hashes.sort()  # 8 bytes a name, where a dict of all names would take some 200
    looked_at = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist()) | {hash(name) for name in deleted}
    seen: dict[bytes, tuple[SetRows, list[Any]]] = {}
    left = []
    for number, part in enumerate(parts):
        kept = np.ones(len(part), bool)
        for i, name in enumerate(names_of(part)) if looked_at else ():
            if hash(name) not in looked_at:
                continue
            if number and name in deleted:
                kept[i] = False
                continue
            image = _image(part, i)
            other, there = seen.setdefault(name, (part, image))
            kept[i] = other is part
            if there != image:
                raise ConfigurationError(
                    f"{other.root} and {part.root} both have an image {name.decode('utf-8', 'backslashreplace')!r}, "
                    "with another class or other bytes. Nothing was written. --prefixes puts the name of its folder "
                    "before the names of each set."
                )
        if kept.any():
            left.append(part if kept.all() else part.only(np.flatnonzero(kept)))
    return left


def _image(part: SetRows, i: int) -> list[Any]:
    """Equal for equal images: label, length and CRC-32."""
    return [int(part.labels[i]), *part.index.column("places")[i, 1:].tolist()]


def names_of(part: SetRows) -> Iterator[bytes]:
    """The names of all images of ``part``, as bytes."""
    for text, lengths in part.names():
        at = 0
        for length in lengths.tolist():
            yield text[at : at + length]
            at += length + 1
