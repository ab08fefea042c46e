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
    """Class numbers of all images, and the names of the classes in the order of their numbers.

    Args:
        labels: Numbers, or names of classes.
        classes: Names in the order of their numbers. Left out, names are numbered in sorted order, and numbers have no
            names.
        what: The labels, for an error message.

    Raises:
        ConfigurationError: A label is missing, is neither a number nor a name, or is none of ``classes``.
    """
    found = np.asarray(labels)
    if found.ndim != 1 or not len(found):
        raise ConfigurationError(f"{what} has shape {found.shape}, expected one label for each of one image or more.")
    if found.dtype.kind in "iu":
        if found.min() < 0 or (classes is not None and found.max() >= len(classes)):
            most = "" if classes is None else f" to {len(classes) - 1}"
            raise ConfigurationError(
                f"{what} has labels from {found.min()} to {found.max()}, expected numbers of classes, from 0{most}. "
                "Leave images without a class out."
            )
        return found.astype(np.int32), None if classes is None else list(classes)
    strange = next((label for label in found.tolist() if not isinstance(label, str)), None)
    if found.dtype.kind not in "OUT" or not all(isinstance(label, str) for label in found.tolist()):
        raise ConfigurationError(
            f"{what} has the label {strange!r}, expected a whole number or the name of a class for each image."
        )
    names, numbers = np.unique(found.astype(str), return_inverse=True)
    if classes is None:
        return numbers.astype(np.int32), names.tolist()
    places = {name: number for number, name in enumerate(classes)}
    if missing := [name for name in names.tolist() if name not in places]:
        raise ConfigurationError(
            f"{what} has {len(missing)} classes that are not in classes=[...], such as {missing[0]!r}. Add them at its "
            "end, or leave their images out."
        )
    return np.array([places[name] for name in names.tolist()], np.int32)[numbers], list(classes)


def digest(*parts: object) -> str:
    """Of arrays and texts: the same in every process."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode())
    return found.hexdigest()
