"""What `lightning-ring plan` reads: the profile of a run, and the cost of a message on its links.

A profile is written by `lightning_ring.monitor.RingProfile`. Times are seconds, sizes bytes, and a
step is that of the slowest rank. A link has a name, two numbers, or a file of `lightning-ring
bench`. Names stand for what Ethernet can do at best, spoken to in TCP: of each 1,538 bytes on the
wire 1,448 are payload (IEEE 802.3 preamble, header, check sequence and gap: 38; IPv4: 20; TCP with
timestamps, RFC 7323: 32). Their latency is that of Gloo over the kernel's TCP: software, no cable.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from lightning_ring.comm.cost import PASSES, TCP_ALPHA_SECONDS, CostModel
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.whole_file import write_whole

FORMAT = 3
_KIND = "lightning_ring profile"
_HOW = "Record one with lightning_ring.monitor.RingProfile."
_GBIT = 1e9 / 8  # bytes a second
_TCP_SHARE = 1448 / 1538
NETWORKS = {
    f"{gbit:g}gbit": CostModel(TCP_ALPHA_SECONDS, gbit * _GBIT * _TCP_SHARE)
    for gbit in (1, 2.5, 10, 25, 100)
}


@dataclass(frozen=True, slots=True)
class Gradient:
    """A parameter's gradient; ``ready`` is when backward has produced it, from backward's begin."""

    name: str
    numel: int
    dtype: str
    num_bytes: int
    ready: float


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds of one step, without communication. Backward ends with the last gradient."""

    data: float
    copy: float
    forward: float
    backward: float
    optimizer: float
    other: float

    @property
    def alone(self) -> float:
        """A step of one rank that communicates nothing."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class Run:
    world_size: int
    num_nodes: int
    device: str
    steps: int
    model: str
    num_parameters: int


@dataclass(frozen=True, slots=True)
class Profile:
    """``gradients`` are in the order in which backward produced them."""

    run: Run
    phases: Phases
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs, by collective; between nodes bandwidth is a whole host's. ``residual``:
    the largest distance of a measured time from these costs, on ranks on ``device``."""

    name: str
    costs: Mapping[str, CostModel]
    device: str = ""
    residual: float = 0.0

    @classmethod
    def of(cls, name: str, cost: CostModel) -> Link:
        return cls(name, dict.fromkeys(PASSES, cost))

    def seconds(self, collective: str, num_bytes: float, num_ranks: int) -> float:
        return self.costs[collective].seconds(num_bytes, num_ranks, collective)


def write_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    content = {"kind": _KIND, "format": FORMAT} | asdict(profile)
    write_whole(Path(path), (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Raises `ConfigurationError`: it is no profile of this format."""
    content = read_json(path)
    about = {"kind": _KIND, "format": FORMAT}
    if not isinstance(content, dict) or not content.items() >= about.items():
        raise ConfigurationError(
            f"{path} is JSON, but no profile of lightning_ring in format {FORMAT}. {_HOW}"
        )
    try:
        gradients = tuple(Gradient(**gradient) for gradient in content["gradients"])
        return Profile(Run(**content["run"]), Phases(**content["phases"]), gradients)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is a damaged profile ({error!r}). {_HOW}") from None


def parse_link(text: str, option: str) -> Link:
    """``"10gbit"``, ``"30,10"`` (µs, Gbit/s), or a file of ``bench --json``. Raises
    `ConfigurationError`: it is none of these.
    """
    if text.endswith(".json"):
        return read_bench(text)
    if text in NETWORKS:
        return Link.of(text, NETWORKS[text])
    try:
        alpha, gbit = map(float, text.split(","))
    except ValueError:
        alpha = gbit = math.nan
    if not (0 <= alpha < math.inf and 0 < gbit < math.inf):
        raise ConfigurationError(
            f"{option} {text}: is no network. Measure yours with `lightning-ring bench --json "
            f"FILE.json` and name the file; or write one of {', '.join(NETWORKS)}, or latency (0 "
            "or more) and speed (more than 0) as MICROSECONDS,GBIT (30,10)."
        )
    return Link.of(f"{alpha:g} µs, {gbit:g} Gbit/s", CostModel(alpha * 1e-6, gbit * _GBIT))


def read_bench(path: str) -> Link:
    """What ``lightning-ring bench --json`` fitted for the backend auto, or else for the first
    backend of the file that has all three collectives. Raises `ConfigurationError`: there is none.
    """
    backends: dict[str, dict[str, CostModel]] = defaultdict(dict)
    residuals: dict[str, float] = defaultdict(float)
    try:
        content = read_json(path)
        device = str(content.get("world", {}).get("device", ""))
        for model in content["models"]:
            name, bandwidth = model["backend"], float(model["bandwidth"] or math.inf)
            alpha = float(model["alpha_seconds"])
            backends[name][model["collective"]] = CostModel(alpha, bandwidth)
            residuals[name] = max(residuals[name], float(model.get("residual", 0)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is no file of `lightning-ring bench` ({error!r})."
        ) from None
    whole = [name for name, costs in backends.items() if costs.keys() >= PASSES.keys()]
    if not whole:
        raise ConfigurationError(
            f"{path} holds no α and B for all of all-reduce, reduce-scatter and all-gather. "
            "Measure them with `lightning-ring bench --sizes 64K,256K,1M,4M,16M --json FILE.json`."
        )
    name = "auto" if "auto" in whole else whole[0]
    return Link(f"{Path(path).name} ({name})", backends[name], device, residuals[name])


def read_json(path: str | os.PathLike[str]) -> Any:
    """Raises `ConfigurationError`: ``path`` cannot be read, or does not hold JSON."""
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not JSON ({error}). {_HOW}") from None
