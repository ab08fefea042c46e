"""What a training step consists of, as recorded: a JSON file that `lightning-ring plan` reads.

Written by `lightning_ring.monitor.RingProfile`. Times are seconds, sizes bytes, and a step is that
of the slowest rank.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning_ring.comm.cost import CostModel
from lightning_ring.errors import ConfigurationError

FORMAT = 1
SHORT_BYTES = 4096  # of the all-reduce that ``Profile.call`` is about
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
    shape: tuple[int, ...] | None = None  # `None`: not recorded


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one step, without communication, except for ``exposed`` and ``total``."""

    data: float
    copy: float
    forward: float
    backward: float  # from its begin to the last gradient
    # of all parameters; of one rank's shard times the number of shards, where it was sharded
    optimizer: float
    other: float
    exposed: float  # what the step waited for communication
    total: float  # the step as it was

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
    batch_size: int
    steps: int
    topology: str = "flat"
    sharded: bool = False
    compression: str | None = None  # name of the compressor
    bucket_cap_mb: float | str | None = None  # MiB, "auto", or `None`: the default


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    digest: str  # of all parameters' names, shapes and dtypes
    num_parameters: int

    def __str__(self) -> str:
        return f"{self.name} ({self.num_parameters:,} parameters, {self.digest[:8]})"


@dataclass(frozen=True, slots=True)
class Questions:
    """Seconds of computation that each byte of a question costs, which is answered by as many
    bytes.
    """

    asking: float  # the rank that asks
    answering: float  # the rank that answers


@dataclass(frozen=True, slots=True)
class Profile:
    model: Model
    run: Run
    phases: Phases
    gradients: tuple[Gradient, ...]  # in the order in which backward produced them
    # ``link`` was measured inside a "node", or over the "network"; `None`: not at all
    link_level: str | None = None
    link: Mapping[str, CostModel] | None = None  # cost of a message, by collective
    # by compressor, seconds for an element besides its messages
    encoding: Mapping[str, float] | None = None
    # on CPUs: processor seconds that each byte of an all-reduce costs a rank
    processor: float | None = None
    # on CPUs: seconds by which a short all-reduce lengthens a step of ranks that compute
    call: float | None = None
    questions: Questions | None = None  # on CPUs: from rank to rank while both compute
    # on CPUs: seconds of each byte of float32 to which values are added in place
    copying: float | None = None

    @property
    def call_beside_link(self) -> float:
        """Seconds of ``call`` that ``link`` does not know of: waits for cores that compute, and
        for the slower rank.
        """
        if self.call is None or self.link is None:
            return 0.0
        return max(
            0.0, self.call - self.link["all_reduce"].seconds(SHORT_BYTES, self.run.world_size)
        )


def fingerprint(parameters: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """Digest of each parameter's name, shape and dtype, in order of registration."""
    digest = hashlib.sha256()
    for name, shape, dtype in parameters:
        digest.update(f"{name} {tuple(shape)} {dtype}\n".encode())
    return digest.hexdigest()


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
            "Record it anew with RingProfile, or plan with the version that recorded it."
        )
    try:
        return profile_of(content)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is a damaged profile ({type(error).__name__}: {error}). {_HOW}"
        ) from None


def profile_of(content: Mapping[str, Any]) -> Profile:
    """What `asdict` of a profile, written as JSON, describes. Raises what a damaged one brings
    about.
    """
    link = content["link"]
    return Profile(
        Model(**content["model"]),
        Run(**content["run"]),
        Phases(**content["phases"]),
        tuple(_gradient(**gradient) for gradient in content["gradients"]),
        content["link_level"],
        None if link is None else {name: _cost(**model) for name, model in link.items()},
        content.get("encoding"),
        content.get("processor"),
        content.get("call"),
        None if content.get("questions") is None else Questions(**content["questions"]),
        content.get("copying"),
    )


def _gradient(shape: Sequence[int] | None = None, **others: Any) -> Gradient:
    return Gradient(**others, shape=None if shape is None else tuple(shape))


def _cost(alpha_seconds: float, bandwidth: float | None) -> CostModel:
    return CostModel(alpha_seconds, math.inf if bandwidth is None else bandwidth)


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


def check_same_model(first: str, one: Profile, second: str, other: Profile) -> None:
    """Raises `ConfigurationError`: the two are of different models; the message names both."""
    if one.model.digest != other.model.digest:
        raise ConfigurationError(
            f"{first} is a profile of {one.model}, and {second} one of {other.model}. Only runs of "
            "one model can be compared: record both with the same one."
        )
