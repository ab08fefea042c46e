"""Labels of a data set as numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.errors import ConfigurationError


def numbered(
    labels: Sequence[Any] | npt.NDArray[Any], classes: Sequence[str] | None, what: str
) -> tuple[npt.NDArray[np.int32], list[str] | None]:
    """Class numbers of all images, and the class names by number.

    Args:
        labels: Numbers, or names of classes.
        classes: Names by number. None: names are numbered in sorted order, and numbers have no
            names.
        what: The labels, for an error message.

    Raises:
        ConfigurationError: A label is missing, is neither a number nor a name, or is none of
            ``classes``.
    """
    found = np.asarray(labels)
    if found.ndim != 1 or not len(found):
        raise ConfigurationError(
            f"{what} has shape {found.shape}, expected one label for each of one image or more."
        )
    if found.dtype.kind in "iu":
        most = float("inf") if classes is None else len(classes) - 1
        if found.min() < 0 or found.max() > most:
            raise ConfigurationError(
                f"{what} has labels from {found.min()} to {found.max()}, expected numbers of "
                f"classes, from 0 to {most}. Leave images without a class out."
            )
        return found.astype(np.int32), None if classes is None else list(classes)
    if strange := [label for label in found.tolist() if not isinstance(label, str)]:
        raise ConfigurationError(
            f"{what} has the label {strange[0]!r}, expected a whole number or the name of a class "
            "for each image."
        )
    unique, numbers = np.unique(found.astype(str), return_inverse=True)
    names = unique.tolist()
    places = {name: place for place, name in enumerate(names if classes is None else classes)}
    if missing := [name for name in names if name not in places]:
        raise ConfigurationError(
            f"{what} has {len(missing)} classes that are not in classes=[...], such as "
            f"{missing[0]!r}. Add them at its end, or leave their images out."
        )
    return np.array([places[name] for name in names], np.int32)[numbers], list(places)


def numbered_column(
    column: Any, classes: Sequence[str] | None, what: str
) -> tuple[npt.NDArray[np.int32], list[str] | None]:
    """`numbered` for a chunked Arrow array; looks at each name once."""
    if column.null_count:
        raise ConfigurationError(
            f"{what} has no label for {column.null_count} of {len(column)} images, expected one "
            "for each. Leave the others out."
        )
    values = column.combine_chunks()
    if hasattr(values, "dictionary"):  # it may hold unused names
        values = values.dictionary_decode()
    if str(values.type).startswith(("int", "uint")):
        return numbered(values.to_numpy(), classes, what)
    encoded = values.dictionary_encode()
    numbers, names = numbered(encoded.dictionary.to_pylist(), classes, what)
    return numbers[encoded.indices.to_numpy()], names


def digest(*parts: object) -> str:
    """A hash of arrays and texts that is the same in every process."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return found.hexdigest()
