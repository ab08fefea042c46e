"""Failures of a monitor's own computations: left out of its numbers, reported once, never the
end of training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_ring.errors import RingError

P = ParamSpec("P")
T = TypeVar("T")


class MonitorFailures:
    """Runs a monitor's own computations, each of which belongs to a part of what it shows.

    An exception in one makes its result a default. The rank warns once a part. A `RingError`
    passes: it is the job's.
    """

    def __init__(self) -> None:
        self._failed: set[str] = set()

    def run(
        self, part: str, default: T, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """What ``compute`` returns, or ``default`` where it raises."""
        try:
            return compute(*args, **kwargs)
        except RingError:
            raise
        except Exception as error:
            if part not in self._failed:
                self._failed.add(part)
                warnings.warn(
                    "lightning_ring: the monitor failed on rank "
                    f"{getattr(rank_zero_only, 'rank', 0)} and leaves out its {part}: "
                    f"{type(error).__name__}: {error}. Training goes on. "
                    "RingStrategy(monitor=False) measures nothing.",
                    stacklevel=2,
                )
            return default
