"""Images in the place of those that cannot be read or decoded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

_TRIES = 10  # of the same class, then as many of any


class Skipped:
    """The images that were skipped, each named once, and their replacements.

    The replacement depends on the image alone: order, crops and other ranks' samples stay as they are, on any number of
    ranks and after resuming. It is the next image of the class, so that class-balanced batches stay balanced; of
    another class where ten of the class cannot be read either.
    """

    def __init__(self) -> None:
        self.reasons: dict[int, str] = {}  # by index
        self._lock = threading.Lock()

    def add(self, index: int, where: str, error: Exception) -> None:
        with self._lock:
            known = index in self.reasons
            self.reasons.setdefault(index, str(error))
            num = len(self.reasons)
        if not known:
            reason = str(error) if where in str(error) else f"{where}: {error}"
            log.warning("lightning_ring: skipped and replaced by another image (%d so far): %s", num, reason)

    def candidates(self, index: int, labels: npt.NDArray[Any]) -> Iterator[int]:
        """Images to try in the place of ``index``, the nearest first."""
        of_class = np.flatnonzero(labels == labels[index])
        after = np.roll(of_class, -1 - int(np.searchsorted(of_class, index)))[: len(of_class) - 1]
        yield from after[:_TRIES].tolist()
        for step in range(1, min(_TRIES + 1, len(labels))):
            yield (index + step) % len(labels)
