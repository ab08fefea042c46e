"""Links by name, by two numbers, or as `lightning-ring bench` measured them.

Names stand for what Ethernet can do at best, spoken to in TCP: of each 1,538 bytes on the wire
1,448 are payload (IEEE 802.3 preamble, header, check sequence and gap: 38; IPv4: 20; TCP with
timestamps, RFC 7323: 32). The latency is that of Gloo over the kernel's TCP: software, no cable.
"""

from __future__ import annotations

import math
from pathlib import Path

from lightning_ring.comm.cost import TCP_ALPHA_SECONDS, CostModel
from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.plan.model import PASSES, Link
from lightning_ring.tools.plan.profile import read_json

_GBIT = 1e9 / 8  # bytes a second
_TCP_SHARE = 1448 / 1538
NETWORKS = {
    f"{gbit:g}gbit": CostModel(TCP_ALPHA_SECONDS, gbit * _GBIT * _TCP_SHARE)
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
    try:
        alpha, gbit = map(float, text.split(","))
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
    return Link.of(f"{alpha:g} µs, {gbit:g} Gbit/s", CostModel(alpha * 1e-6, gbit * _GBIT))


def read_bench(path: str) -> Link:
    """What ``lightning-ring bench --json`` fitted for the backend auto, or else for the first
    backend of the file that has all three collectives.

    Raises `ConfigurationError`: no such file, or no such backend in it.
    """
    found: dict[str, dict[str, CostModel]] = {}
    try:
        for model in read_json(path).get("models", []):
            bandwidth = math.inf if model["bandwidth"] is None else float(model["bandwidth"])
            cost = CostModel(float(model["alpha_seconds"]), bandwidth)
            found.setdefault(model["backend"], {})[model["collective"]] = cost
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is a damaged file of `lightning-ring bench` ({error!r})."
        ) from None
    whole = [name for name, costs in found.items() if len(costs) == len(PASSES)]
    if not whole:
        raise ConfigurationError(
            f"{path} holds no α and B for all of all-reduce, reduce-scatter and all-gather. "
            "Measure them with `lightning-ring bench --sizes 64K,256K,1M,4M,16M --json FILE.json`."
        )
    name = "auto" if "auto" in whole else whole[0]
    return Link(f"{Path(path).name} ({name})", found[name])
