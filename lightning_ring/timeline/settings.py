"""What was asked for: by an argument, or by the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_ring.errors import ConfigurationError
from lightning_ring.timeline.paths import checked_path, expanded

PATH_VARIABLE = "RING_TIMELINE"
SWITCH_VARIABLE = "RING_TIMELINE_SWITCH"
SIZE_VARIABLE = "RING_TIMELINE_MAX_MB"
DEFAULT_MAX_MB = 64.0


@dataclass(frozen=True, slots=True)
class TimelineSettings:
    """
    Attributes:
        path: Where the merged trace goes; `None`: nothing is recorded, unless a script starts it.
        switch: Record only while this file exists on rank 0's host.
        max_mb: Largest size of a rank's file, in MiB.
    """

    path: Path | None
    switch: Path | None
    max_mb: float


def timeline_settings(argument: str | Path | None, environ: Mapping[str, str]) -> TimelineSettings:
    """``argument`` is that of `RingStrategy`, which counts more than RING_TIMELINE.

    Raises:
        ConfigurationError: A value cannot work.
    """
    path: Path | None = None
    if argument is not None:
        path = checked_path(argument, f"RingStrategy got timeline={argument!r}")
    elif named := environ.get(PATH_VARIABLE):
        path = checked_path(named, f"{PATH_VARIABLE} is {named!r}")
    switch = environ.get(SWITCH_VARIABLE)
    if switch and path is None:
        raise ConfigurationError(
            f"{SWITCH_VARIABLE} is {switch!r}, but no timeline is asked for. Set {PATH_VARIABLE}=trace.json too, or "
            "give RingStrategy(timeline='trace.json')."
        )
    switch_path = expanded(switch, f"{SWITCH_VARIABLE} is {switch!r}") if switch else None
    return TimelineSettings(path, switch_path, _max_mb(environ.get(SIZE_VARIABLE)))


def _max_mb(text: str | None) -> float:
    if not text:
        return DEFAULT_MAX_MB
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size >= 1):
        raise ConfigurationError(
            f"{SIZE_VARIABLE} is {text!r}, expected the largest size of a rank's timeline in MiB, 1 or more, as in 64."
        )
    return size
