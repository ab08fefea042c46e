"""Links by name, by two numbers, or as `lightning-ring bench` measured them.

Constants are what can be derived or cited, and hence what a link can do at best; measure yours with
`lightning-ring bench --json`.

- Ethernet, spoken to in TCP: of each 1,538 bytes on the wire 1,448 are payload (IEEE 802.3
  preamble, header, check sequence and gap: 38; IPv4: 20; TCP with timestamps, RFC 7323: 32), 94.1
  %. The latency is that of Gloo over the kernel's TCP, as `benchmarks/step/plan.py` measures it
  between network namespaces of one machine (160 and 260 µs at 3 and 1 Gbit/s): software, no cable.
- InfiniBand and RoCE, NVLink and PCI: the constants from which NCCL chooses its algorithms,
  src/graph/tuning.cc (latency of a step of the ring, protocol Simple: network 9.6 µs, NVLink 3.4,
  PCI 5.7) and src/graph/topo.h (12.0 GB/s for 100 Gbit/s of network; 20.0 GB/s for each of an
  A100's 12 links, 20.6 for each of an H100's 18; PCI gen 3 x16 12.0, of which gen 4 is twice as
  much).
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


def _tcp(gbit: float) -> CostModel:
    return CostModel(TCP_ALPHA_SECONDS, gbit / 8 * _GB * _TCP_SHARE)


def _rdma(gbit: float) -> CostModel:
    return CostModel(9.6e-6, gbit / 100 * 12.0 * _GB)


NETWORKS = {
    "1gbit": _tcp(1),
    "2.5gbit": _tcp(2.5),
    "10gbit": _tcp(10),
    "25gbit": _tcp(25),
    "100gbit": _tcp(100),
    "roce-25": _rdma(25),
    "roce-100": _rdma(100),
    "ib-edr": _rdma(100),
    "ib-hdr": _rdma(200),
    "ib-ndr": _rdma(400),
    "pcie3": CostModel(5.7e-6, 12.0 * _GB),
    "pcie4": CostModel(5.7e-6, 24.0 * _GB),
    "nvlink3": CostModel(3.4e-6, 12 * 20.0 * _GB),
    "nvlink4": CostModel(3.4e-6, 18 * 20.6 * _GB),
}


def parse_link(text: str, option: str) -> Link:
    """``"ib-hdr"``, ``"8xib-hdr"`` (so many adapters a host), ``"30,10"`` (µs, Gbit/s), or a file
    of ``bench --json``.

    Raises `ConfigurationError`: it is none of these; the message lists the names.
    """
    if text.endswith(".json"):
        return read_bench(text)
    times, _, name = text.rpartition("x")
    if name in NETWORKS and (not times or (times.isdecimal() and int(times) > 0)):
        link = Link.of(text, NETWORKS[name])
        return link.faster(int(times)) if times else link
    parts = text.split(",")
    try:
        alpha, gbit = (float(part) for part in parts)
    except ValueError:
        raise ConfigurationError(
            f"{option} {text}: is no network. Write one of {', '.join(NETWORKS)}; 8xib-hdr for "
            "eight adapters a host; latency and speed as MICROSECONDS,GBIT (30,10); or the file "
            "of `lightning-ring bench --json FILE.json`."
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
    return Link(f"{Path(path).name} ({name})", whole[name])
