"""What a training step consists of, as recorded: a JSON file that `lightning-ring plan` reads.

Written by `lightning_ring.monitor.RingProfile`. Times are seconds, sizes bytes, and a step is that
of the slowest rank.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError

FORMAT = 2
_KIND = "lightning_ring profile"
_HOW = "Record one with lightning_ring.monitor.RingProfile."


@dataclass(frozen=True, slots=True)
class Gradient:
    """One trainable parameter's gradient; ``ready`` is when backward has produced it, from
    backward's begin.
    """

    name: str
    numel: int
    dtype: str
    num_bytes: int
    ready: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one step, without communication."""

    data: float
    copy: float
    forward: float
    backward: float  # from its begin to the last gradient
    optimizer: float
    other: float

    @property
    def alone(self) -> float:
        """A step of one rank that communicates nothing."""
        return self.data + self.copy + self.forward + self.backward + self.optimizer + self.other


@dataclass(frozen=True, slots=True)
class Run:
    """The run that was recorded."""

    world_size: int
    num_nodes: int
    device: str
    steps: int


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    num_parameters: int

    def __str__(self) -> str:
        return f"{self.name} ({self.num_parameters:,} parameters)"


@dataclass(frozen=True, slots=True)
class Profile:
    model: Model
    run: Run
    phases: Phases
    gradients: tuple[Gradient, ...]  # in the order in which backward produced them


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Whoever opens ``path`` meanwhile finds the old file or the new one, and never a part."""
    content = {"kind": _KIND, "format": FORMAT} | asdict(profile)
    beside = Path(f"{path}.{os.getpid()}.part")
    try:
        beside.write_text(json_text(content))
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """
    Raises:
        ConfigurationError: It is not there, is no profile, or one of another format; or its numbers
            cannot be.
    """
    content = read_json(path)
    if not isinstance(content, dict) or content.get("kind") != _KIND:
        raise ConfigurationError(f"{path} is JSON, but no profile of lightning_ring. {_HOW}")
    if content.get("format") != FORMAT:
        raise ConfigurationError(
            f"{path} has format {content.get('format')!r}, and this lightning_ring reads {FORMAT}. "
            "Record it anew with RingProfile."
        )
    try:
        gradients = tuple(Gradient(**gradient) for gradient in content["gradients"])
        model, run = Model(**content["model"]), Run(**content["run"])
        return Profile(model, run, Phases(**content["phases"]), gradients)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is a damaged profile ({type(error).__name__}: {error}). {_HOW}"
        ) from None


def json_text(content: Any) -> str:
    """``content`` as JSON, which has no infinity: a number that is not finite is ``null``."""
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: str | os.PathLike[str]) -> Any:
    """Raises `ConfigurationError`: ``path`` cannot be read, or does not hold JSON."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}. {_HOW}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON ({error}). {_HOW}") from None
