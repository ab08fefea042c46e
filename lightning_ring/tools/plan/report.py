"""The plan as lines of text, as JSON and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lightning_ring.comm.cost import MOST_RANKS_FOR_SMALL_BUCKETS, default_cap_mb
from lightning_ring.tools.plan.advice import Advice, in_words
from lightning_ring.tools.plan.model import MIB, Link, PredictedStep, Settings
from lightning_ring.tools.plan.profile import Profile

Table = Mapping[str, Sequence[PredictedStep]]

ASSUMED = (
    "assumed: every rank as fast as the one recorded, no stragglers, nobody else on the network; "
    "one ring (or a ring in each node and rings across), where NCCL may choose trees; forward "
    "reads parameters as backward, mirrored, produces their gradients; an optimizer's step takes "
    "1/N when sharded; compressing costs what the profile measured, or nothing."
)
# of predicted / measured - 1 in docs/performance.md, which `benchmarks/step/plan.py` measures
LEAST_ERROR, GREATEST_ERROR = -0.30, -0.01
ERROR_RANGE = (
    f"predictions lean low: on CPUs they were {-LEAST_ERROR:.0%} to {-GREATEST_ERROR:.0%} below "
    "what was measured, most where ranks share cores: filling buckets and the network's protocol, "
    "which then wait for cores that compute, are not in the model."
)


def heading(
    profile: Profile, network: Link, node: Link | None, ranks_per_node: int, settings: Settings
) -> Iterator[str]:
    run, phases = profile.run, profile.phases
    gradients = sum(gradient.num_bytes for gradient in profile.gradients) / MIB
    yield (
        f"{profile.model}, {gradients:.1f} MiB of gradients in {len(profile.gradients)} tensors; "
        f"batch {run.batch_size} a rank on {run.device}, recorded on {run.world_size} rank(s), "
        f"{run.steps} steps"
    )
    parts = ("data", "copy", "forward", "backward", "optimizer", "other")
    words = ", ".join(f"{name} {1e3 * getattr(phases, name):.1f}" for name in parts)
    yield f"a step of one rank alone takes {1e3 * phases.alone:.1f} ms: {words}"
    yield f"between {'nodes' if ranks_per_node > 1 else 'ranks'}: {_in_words(network)}"
    if node is not None and ranks_per_node > 1:
        yield f"in a node, of {ranks_per_node} ranks: {_in_words(node)}"
    cap, chosen = _cap_in_words(settings.bucket_cap_mb, run.device), settings.compression
    yield f"buckets of {cap}, {'no compression' if chosen is None else f'compression {chosen}'}"
    yield f"topology {settings.topology}{_taken(settings.topology, run.device, ranks_per_node)}"


def _taken(topology: str, device: str, ranks_per_node: int) -> str:
    """What the strategy makes of ``topology="auto"`` on several nodes, and what the sharded
    column assumes.
    """
    if topology != "auto":
        return ""
    if device != "cpu":
        return ": one ring, which NCCL arranges by node"
    return (
        ", which is hierarchical on several nodes"
        if ranks_per_node > 1
        else ", which is flat: one rank a node"
    )


def slower_topology(table: Table) -> Iterator[str]:
    """A line where the topology that the strategy takes by itself is predicted to be the slower
    one.
    """
    if "hierarchical" not in table:
        return
    pairs = zip(table["flat"], table["hierarchical"], strict=True)
    slower = [nested.world_size for flat, nested in pairs if nested.seconds > 1.01 * flat.seconds]
    if slower:
        sizes = ", ".join(f"{size:,}" for size in slower)
        yield (
            f"topology='auto' takes the hierarchical one, which is slower here on {sizes} ranks: "
            "set topology='flat'."
        )


def _cap_in_words(cap_mb: float | None, device: str) -> str:
    if cap_mb is not None:
        return f"{cap_mb:g} MiB"
    few, many = default_cap_mb(device, 1), default_cap_mb(device, MOST_RANKS_FOR_SMALL_BUCKETS + 1)
    if few == many:
        return f"{few:g} MiB"
    return f"{few:g} MiB, {many:g} on more than {MOST_RANKS_FOR_SMALL_BUCKETS} ranks (the default)"


def _in_words(link: Link) -> str:
    cost = link.costs["all_reduce"]
    return (
        f"{link.name}: {1e6 * cost.alpha_seconds:,.4g} µs a message, {cost.bandwidth / 1e9:.3g} "
        "GB/s"
    )


def table_lines(table: Table, batch_size: int) -> Iterator[str]:
    """A line a number of ranks; for each way its step, its efficiency, and how much of the step
    is exposed.
    """
    yield f"{'':>6}" + "".join(f"  {way:^33}" for way in table)
    yield f"{'ranks':>6}" + f"  {'step ms':>8} {'images/s':>10} {'eff.':>5} {'exposed':>7}" * len(
        table
    )
    for row in zip(*table.values(), strict=True):
        line = f"{row[0].world_size:>6,}"
        for step in row:
            images = step.world_size * batch_size / step.seconds
            share = step.exposed / step.seconds
            line += (
                f"  {1e3 * step.seconds:>8.1f} {images:>10,.0f} {step.efficiency:>5.0%} "
                f"{share:>7.0%}"
            )
        yield line


def check_line(check: Mapping[str, Any]) -> str:
    predicted, measured = 1e3 * check["predicted_seconds"], 1e3 * check["measured_seconds"]
    return (
        f"{check['profile']}: {check['world_size']} rank(s) on {check['num_nodes']} node(s), "
        f"predicted {predicted:.1f} ms a step, measured {measured:.1f} ms, error "
        f"{check['error']:+.1%}"
    )


def as_json(
    profile: Profile,
    network: Link,
    node: Link | None,
    ranks_per_node: int,
    settings: Settings,
    table: Table,
    advice: Advice,
    checks: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Seconds and bytes a second throughout; a bandwidth may be infinite."""
    return {
        "model": asdict(profile.model),
        "run": asdict(profile.run),
        "phases": asdict(profile.phases),
        "network": _link_json(network),
        "node": None if node is None else _link_json(node),
        "ranks_per_node": ranks_per_node,
        "settings": asdict(settings),
        "assumed": ASSUMED,
        "error_range": [LEAST_ERROR, GREATEST_ERROR],
        "predictions": {
            way: [asdict(step) | {"efficiency": step.efficiency} for step in steps]
            for way, steps in table.items()
        },
        "advice": asdict(advice) | {"text": in_words(advice)},
        "checks": list(checks),
    }


def _link_json(link: Link) -> dict[str, Any]:
    return {"name": link.name} | {
        collective: asdict(cost) for collective, cost in link.costs.items()
    }


def plot(table: Table, title: str, path: str) -> None:
    """Efficiency and step time over the number of ranks, a line a way."""
    from matplotlib.figure import Figure  # no pyplot: it would look for a display
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(10, 4), layout="constrained")
    efficiency, seconds = figure.subplots(1, 2)
    for way, steps in table.items():
        ranks = [step.world_size for step in steps]
        efficiency.plot(
            ranks, [100 * step.efficiency for step in steps], marker="o", markersize=3, label=way
        )
        seconds.plot(
            ranks, [1e3 * step.seconds for step in steps], marker="o", markersize=3, label=way
        )
    efficiency.set(title=title, ylabel="efficiency, %", ylim=(0, None))
    seconds.set(title="a step", ylabel="ms", yscale="log")
    for axes in (efficiency, seconds):
        axes.set(xlabel="ranks", xscale="log")
        axes.grid(True, which="both", alpha=0.2)
    for axis in (efficiency.xaxis, seconds.xaxis, seconds.yaxis):  # 5,000 instead of 5 × 10³
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if axis is seconds.yaxis else (1,)))
        axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        axis.set_minor_formatter(NullFormatter())
    for axes in (efficiency, seconds):
        axes.legend()
    figure.savefig(path, dpi=120)
