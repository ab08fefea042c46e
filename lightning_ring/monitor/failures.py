"""Failures of a monitor's own computations: left out of its numbers, reported once, never the end of training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_ring.errors import RingError

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("lightning_ring")


class LeftOut:
    """Runs a monitor's own computations, each of which belongs to one of ``parts`` (52 at most, equal on all ranks).

    An exception in one makes its result a default, and the part counts as failed. Rank 0 warns once a part; other
    ranks, whose failures travel in their rows, log it at INFO. A `RingError` passes: it is the job's.
    """

    def __init__(self, parts: Sequence[str]) -> None:
        assert len(parts) <= 52, "they travel as the bits of a float64"
        self._parts = list(parts)
        self._failed: set[str] = set()
        self._told: set[tuple[int, str]] = set()

    def run(self, part: str, default: T, compute: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What ``compute`` returns, or ``default`` where it raises."""
        assert part in self._parts, part
        try:
            return compute(*args, **kwargs)
        except RingError:
            raise
        except Exception as error:
            if part not in self._failed:
                self._failed.add(part)
                self._say(part, error)
            return default

    @property
    def bits(self) -> float:
        """The parts that failed on this rank so far, as a number for a row."""
        return float(sum(1 << index for index, part in enumerate(self._parts) if part in self._failed))

    def tell_of(self, bits_by_rank: Sequence[float]) -> None:
        """On rank 0: warn of what other ranks left out, once each."""
        for rank, bits in enumerate(bits_by_rank):
            for index, part in enumerate(self._parts):
                if rank and int(bits) >> index & 1 and (rank, part) not in self._told:
                    self._told.add((rank, part))
                    rank_zero_warn(
                        f"lightning_ring: the monitor failed on rank {rank} and leaves out its {part}. Training goes "
                        "on. That rank logs the error at level INFO of the logger 'lightning_ring'."
                    )

    def _say(self, part: str, error: Exception) -> None:
        if getattr(rank_zero_only, "rank", 0):
            _log.info("the monitor leaves out its %s: %s: %s", part, type(error).__name__, error)
            return
        rank_zero_warn(
            f"lightning_ring: the monitor failed and leaves out its {part}: {type(error).__name__}: {error}. Training "
            "goes on. Please report this; RingStrategy(monitor=False) measures nothing."
        )
