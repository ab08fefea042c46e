"""The plan as lines of text: a table, and the changes that save most in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from lightning_ring.tools.bench import MOST_RESIDUAL
from lightning_ring.tools.plan.inputs import Link, Profile
from lightning_ring.tools.plan.model import MIB, Cluster, PredictedStep, Settings, predict

Table = Mapping[str, Sequence[PredictedStep]]

AS_IT_IS = "RingStrategy()"
CAPS_MB = (1.0, 2.0, 4.0, 6.0, 10.0, 25.0, 50.0, 100.0, 200.0)
WORTH = 0.01  # of a step
_CHANGING = ("compression", "LocalSGD")  # other results than before
NOTES = (
    "assumed: every rank as fast as the one recorded, no stragglers, nobody else on the network, "
    "cores that are free for messages, one ring where NCCL may choose trees. What 16 bits and "
    "LocalSGD cost in accuracy: docs/guides/slow-links.md.",
    "not predicted, measure them: int8, onebit, terngrad, topk, dgc, powersgd; DiLoCo, "
    "AsynchronousGossip, ParameterServer.",
)


def tabulate(profile: Profile, clusters: Sequence[Cluster]) -> Table:
    """What `RingStrategy` can do that is predicted, by its argument, on each of ``clusters``."""
    ways = {AS_IT_IS: Settings(), "algorithm=Sharded()": Settings(sharded=True)}
    if any(gradient.dtype == "float32" for gradient in profile.gradients):
        ways["compression='bf16'"] = Settings(sixteen_bits=True)
    ways |= {f"LocalSGD({steps})": Settings(local_steps=steps) for steps in (8, 32)}
    return {
        way: [predict(profile, cluster, settings) for cluster in clusters]
        for way, settings in ways.items()
    }


def changes(profile: Profile, cluster: Cluster) -> list[tuple[str, float]]:
    """Arguments of `RingStrategy`, and the share of a step that each saves; the best first."""
    steps = {way: found.seconds for way, (found,) in tabulate(profile, [cluster]).items()}
    now = steps.pop(AS_IT_IS)
    caps = {cap: predict(profile, cluster, Settings(bucket_cap_mb=cap)).seconds for cap in CAPS_MB}
    best = min(caps, key=caps.__getitem__)
    steps[f"bucket_cap_mb={best:g}"] = caps[best]
    saved = [(way, 1 - seconds / now) for way, seconds in steps.items()]
    return sorted(saved, key=lambda pair: -pair[1])


def heading(profile: Profile, network: Link, node: Link | None) -> Iterator[str]:
    run, phases = profile.run, profile.phases
    gradients = sum(gradient.num_bytes for gradient in profile.gradients) / MIB
    yield (
        f"{run.model} ({run.num_parameters:,} parameters), {gradients:.1f} MiB of gradients in "
        f"{len(profile.gradients)} tensors; on {run.device}, recorded on {run.world_size} rank(s), "
        f"{run.steps} steps"
    )
    parts = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in asdict(phases).items())
    yield f"a step of one rank alone takes {1e3 * phases.alone:.1f} ms: {parts}"
    for where, link in (("between nodes", network), ("in a node", node)):
        if link is None:
            continue
        cost = link.costs["all_reduce"]
        yield (
            f"{where}: {link.name}: {1e6 * cost.alpha_seconds:,.4g} µs a message, "
            f"{cost.bandwidth / 1e9:.3g} GB/s"
        )
        if link.device and (link.device == "cpu") != (run.device == "cpu"):
            yield (
                f"warning: {link.name} was measured on {link.device}, and the profile was recorded "
                f"on {run.device}. Measure it with `lightning-ring bench --device {run.device}`."
            )
        if link.residual > MOST_RESIDUAL:
            yield (
                f"warning: the times of {link.name} are up to {link.residual:.0%} away from its α "
                "and B, and this plan is no better. Measure again on an idle machine."
            )


def table_lines(table: Table) -> Iterator[str]:
    """A line a number of ranks: for each way its step, and its efficiency."""
    yield f"{'':>6}" + "".join(f"  {way:>20}" for way in table)
    yield f"{'ranks':>6}" + f"  {'step ms':>12} {'eff.':>7}" * len(table)
    for row in zip(*table.values(), strict=True):
        cells = (f"  {1e3 * step.seconds:>12.1f} {step.efficiency:>7.0%}" for step in row)
        yield f"{row[0].world_size:>6,}" + "".join(cells)


def advice(now: PredictedStep, found: Sequence[tuple[str, float]], data: float) -> Iterator[str]:
    """All that save something, and what to try first."""
    waits = now.exposed / now.seconds
    head = f"on {now.world_size:,} ranks {waits:.0%} of a step waits for communication"
    saving = {way: f"{saved:.0%}" for way, saved in found if saved >= WORTH}
    alike = [way for way in saving if not way.startswith(_CHANGING)]
    if saving:
        listed = ", ".join(map(" ".join, saving.items()))
        yield f"{head}. Each of these alone saves, of a step: {listed}."
    else:
        yield f"{head}. No change in this plan would save {WORTH:.0%}."
    if alike:
        yield f"what to change first: {alike[0]} ({saving[alike[0]]}), which trains as before."
    if (share := data / now.seconds) > max(waits, WORTH):
        yield f"{share:.0%} of the step waits for data, which is more: ask GapMeter why."
