"""Settings and paths of a timeline: ``trace.json``, and each rank's ``trace.rank0.jsonl`` beside
it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError

GENERATOR = "lightning_ring"


def checked_path(value: Any, asked: str) -> Path:
    """``value`` as a path that a timeline may be written to, checked without writing; ``~`` is a
    home.

    ``asked`` begins the error message: ``"RingStrategy got timeline='trace.json'"``. Raises
    `ConfigurationError` if it is no name of a JSON file, its folder cannot be written, or the file
    exists and is no timeline.
    """
    expected = "expected the name of a file that ends in .json, such as 'logs/trace.json'"
    if not isinstance(value, (str, os.PathLike)) or isinstance(value, bytes):
        raise ConfigurationError(f"{asked}, {expected}.")
    path = expanded(value, asked)
    if path.suffix != ".json" or path.stem == "":
        raise ConfigurationError(f"{asked}, {expected}.")
    try:
        _check_place(path, asked, expected)
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ConfigurationError(
            f"{asked}, which cannot be looked up ({error}). Give another path."
        ) from None
    return path


def expanded(value: str | os.PathLike[str], asked: str) -> Path:
    """``value`` with the home folder for ``~``. Raises `ConfigurationError`: there is no such
    home.
    """
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"{asked}, but: {error} Write the path out.") from None


def _check_place(path: Path, asked: str, expected: str) -> None:
    """What `checked_path` says of a path whose name is right."""
    if path.is_dir():
        raise ConfigurationError(f"{asked}, which is a folder; {expected}.")
    folder = path.absolute().parent
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        raise ConfigurationError(f"{asked}, but {folder} is no folder. Give another path.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"{asked}, but the folder {folder} cannot be written. Give another path."
        )
    if path.exists() and not is_timeline(path):
        raise ConfigurationError(
            f"{asked}, a file that exists and was not written as a timeline. It is left as it is: "
            "give another path, or remove it."
        )


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


PATH_VARIABLE = "RING_TIMELINE"
SWITCH_VARIABLE = "RING_TIMELINE_SWITCH"
SIZE_VARIABLE = "RING_TIMELINE_MAX_MB"
DEFAULT_MAX_MB = 64.0


@dataclass(frozen=True, slots=True)
class TimelineSettings:
    # where the merged trace goes; `None`: nothing is recorded, unless a script starts it
    path: Path | None
    switch: Path | None  # record only while this file exists on rank 0's host
    max_mb: float  # largest size of a rank's file, in MiB


def timeline_settings(argument: str | Path | None, environ: Mapping[str, str]) -> TimelineSettings:
    """``argument`` is that of `RingStrategy`, which counts more than RING_TIMELINE.

    Raises `ConfigurationError`: a value cannot work.
    """
    path: Path | None = None
    if argument is not None:
        path = checked_path(argument, f"RingStrategy got timeline={argument!r}")
    elif named := environ.get(PATH_VARIABLE):
        path = checked_path(named, f"{PATH_VARIABLE} is {named!r}")
    switch = environ.get(SWITCH_VARIABLE)
    if switch and path is None:
        raise ConfigurationError(
            f"{SWITCH_VARIABLE} is {switch!r}, but no timeline is asked for. Set "
            f"{PATH_VARIABLE}=trace.json too, or give RingStrategy(timeline='trace.json')."
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
            f"{SIZE_VARIABLE} is {text!r}, expected the largest size of a rank's timeline in MiB, "
            "1 or more, as in 64."
        )
    return size
