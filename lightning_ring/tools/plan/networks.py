"""Links by name, by two numbers, or as `lightning-ring bench` measured them.

Names stand for what Ethernet can do at best, spoken to in TCP: of each 1,538 bytes on the wire
1,448 are payload (IEEE 802.3 preamble, header, check sequence and gap: 38; IPv4: 20; TCP with
timestamps, RFC 7323: 32). The latency is that of Gloo over the kernel's TCP: software, no cable.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lightning_ring.comm.cost import TCP_ALPHA_SECONDS, CostModel
from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.plan.model import Link
from lightning_ring.tools.plan.profile import read_json

_GB = 1e9
_TCP_SHARE = 1448 / 1538
MOST_RESIDUAL = 0.5  # of a fit that is believed


NETWORKS = {
    f"{gbit:g}gbit": CostModel(TCP_ALPHA_SECONDS, gbit / 8 * _GB * _TCP_SHARE)
    for gbit in (1, 2.5, 10, 25, 100)
}


def parse_link(text: str, option: str) -> Link:
    """``"10gbit"``, ``"30,10"`` (µs, Gbit/s), or a file of ``bench --json``.

    Raises `ConfigurationError`: it is none of these; the message lists the names.
    """
    if text.endswith(".json"):
        return read_bench(text)
    if text in NETWORKS:
        return Link.of(text, NETWORKS[text])
    parts = text.split(",")
    try:
        alpha, gbit = (float(part) for part in parts)
    except ValueError:
        raise ConfigurationError(
            f"{option} {text}: is no network. Measure yours with `lightning-ring bench --json "
            f"FILE.json` and name the file; or write one of {', '.join(NETWORKS)}, or latency and "
            "speed as MICROSECONDS,GBIT (30,10)."
        ) from None
    if not (0 <= alpha < math.inf and 0 < gbit < math.inf):
        raise ConfigurationError(
            f"{option} {text}: a latency is at least 0 µs, and a speed more than 0 Gbit/s; write "
            "for instance 30,10."
        )
    return Link.of(f"{alpha:g} µs, {gbit:g} Gbit/s", CostModel(alpha * 1e-6, gbit / 8 * _GB))


def read_bench(path: str) -> Link:
    """What ``lightning-ring bench --json`` fitted for the backend auto, or else for the first
    backend of the file.

    Raises `ConfigurationError`: no such file, or nothing in it was fitted for all three
    collectives.
    """
    content = read_json(path)
    models: list[dict[str, Any]] = content.get("models", []) if isinstance(content, dict) else []
    found: dict[str, dict[str, CostModel]] = {}
    try:
        for model in models:
            bandwidth = math.inf if model["bandwidth"] is None else float(model["bandwidth"])
            cost = CostModel(float(model["alpha_seconds"]), bandwidth)
            found.setdefault(model["backend"], {})[model["collective"]] = cost
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is a damaged file of `lightning-ring bench` ({error!r})."
        ) from None
    whole = {name: costs for name, costs in found.items() if len(costs) == 3}
    if not whole:
        raise ConfigurationError(
            f"{path} holds no α and B for all of all-reduce, reduce-scatter and all-gather. "
            "Measure them with `lightning-ring bench --sizes 64K,256K,1M,4M,16M --json FILE.json`."
        )
    name = "auto" if "auto" in whole else next(iter(whole))
    residuals = [model.get("residual", 0.0) for model in models if model["backend"] == name]
    return Link(f"{Path(path).name} ({name})", whole[name], max(residuals))
