"""What the argument ``timeline=`` and the environment say of a timeline, checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError

GENERATOR = "lightning_ring"


def checked_path(value: Any, asked: str) -> Path:
    """``value`` as a path that a timeline may be written to, checked without writing; ``~`` is a
    home. Whether its folder can be written shows when the recording starts.

    ``asked`` begins the error message: ``"RingStrategy got timeline='trace.json'"``. Raises
    `ConfigurationError` if it is no name of a JSON file, or the file exists and is no timeline.
    """
    path = Path(value).expanduser() if isinstance(value, (str, os.PathLike)) else Path()
    if path.suffix != ".json":
        raise ConfigurationError(
            f"{asked}, expected the name of a file that ends in .json, such as 'logs/trace.json'."
        )
    if os.path.exists(path) and not is_timeline(path):
        raise ConfigurationError(
            f"{asked}, which exists and was not written as a timeline. It is left as it is: give "
            "another path, or remove it."
        )
    return path


def is_timeline(path: Path) -> bool:
    """Whether the file was written by us, or is empty. A timeline of an earlier run is replaced,
    nothing else.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(200)
    except OSError:
        return False
    return not start or f'"generator":"{GENERATOR}"'.encode() in start


def timeline_path(argument: str | Path | None, environ: Mapping[str, str]) -> Path | None:
    """Where the merged trace goes; `None`: nothing is recorded, unless a script starts it.
    ``argument`` is that of `RingStrategy`, which counts more than RING_TIMELINE.

    Raises `ConfigurationError`: a path cannot work.
    """
    if argument is not None:
        return checked_path(argument, f"RingStrategy got timeline={argument!r}")
    if named := environ.get("RING_TIMELINE"):
        return checked_path(named, f"RING_TIMELINE is {named!r}")
    return None
