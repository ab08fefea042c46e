"""Which images of a set a change is about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lightning_ring.data.shards.expressions import matching
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ConfigurationError

_AT_ONCE = 1 << 18  # names in memory together


def select(
    index: ShardIndex, manifest: Manifest, where: str | None = None, names: Sequence[str] = ()
) -> npt.NDArray[np.int64]:
    """The numbers of the images that ``where`` or ``names`` mean, ascending.

    Raises `ConfigurationError`: there is no image of such a name, or ``where`` is no expression.
    """
    found = np.zeros(len(index), bool)
    if where is not None:
        found[matching(where, index, manifest.classes)] = True
    found[rows_of(index, names)] = True
    return np.flatnonzero(found)


def rows_of(index: ShardIndex, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """For each of ``names`` the number of its image.

    Raises `ConfigurationError`: an image is not there.
    """
    if not names:
        return np.zeros(0, np.int64)
    wanted = dict.fromkeys(names, -1)
    for start in range(0, len(index), _AT_ONCE):
        for i, name in enumerate(index.names_in(slice(start, min(start + _AT_ONCE, len(index)))), start):
            if name in wanted:
                wanted[name] = i
    if absent := [name for name, i in wanted.items() if i < 0]:
        shown = ", ".join(map(repr, absent[:3])) + (f", and {len(absent) - 3} more" if len(absent) > 3 else "")
        raise ConfigurationError(
            f"the set has no image {shown}. Expected names as `lightning-ring ls` shows them. Nothing was changed."
        )
    return np.array([wanted[name] for name in names], np.int64)
