"""Images in the place of those that cannot be read or decoded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from itertools import count, takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

_NEAR = 10  # images that are tried one after the other, before those further and further on


class Skipped:
    """The images that were skipped, each named once, and their replacements.

    The replacement depends on the image alone: order, crops and other ranks' samples stay as they
    are, on any number of ranks and after resuming. It is the next image of the class, so that
    class-balanced batches stay balanced; of another class where none that is tried of the class can
    be read.
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
            log.warning(
                "lightning_ring: skipped and replaced by another image (%d so far): %s", num, reason
            )

    def candidates(self, index: int, labels: npt.NDArray[Any]) -> Iterator[int]:
        """Images to try in the place of ``index``: of its class, then of any; the nearest first."""
        of_class = np.flatnonzero(labels == labels[index])
        at = int(np.searchsorted(of_class, index))
        yield from (int(of_class[(at + step) % len(of_class)]) for step in _steps(len(of_class)))
        yield from ((index + step) % len(labels) for step in _steps(len(labels)))


def _steps(num: int) -> list[int]:
    """How far from an image of ``num`` others are tried: neighbours lie in one shard, and may be
    lost together.
    """
    further = takewhile(lambda step: step < num, (_NEAR * 2**doubled for doubled in count(1)))
    return [*range(1, min(_NEAR + 1, num)), *further]
