"""What to change first: every change is tried in the model, the best one is kept, and the rest
are tried on top.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from lightning_ring.tools.plan.model import Cluster, PredictedStep, Settings, nests, predict
from lightning_ring.tools.plan.profile import Profile

CAPS_MB = (1.0, 2.0, 4.0, 6.0, 10.0, 25.0, 50.0, 100.0, 200.0)
MOST_CHANGES = 5
WORTH = 0.01  # of a step


@dataclass(frozen=True, slots=True)
class Change:
    """One argument of `RingStrategy`, and the share of the step at the start that it saves on
    top of those before.
    """

    argument: str
    saves: float


@dataclass(frozen=True, slots=True)
class Advice:
    """For one number of ranks: the step now, changes in order, the step after them, and the rest
    of it.
    """

    now: PredictedStep
    changes: tuple[Change, ...]
    then: PredictedStep
    settings: Settings
    # what twice the network's bandwidth, and nothing else, would save of the step now
    faster_link: float
    data: float


def advise(profile: Profile, cluster: Cluster, settings: Settings) -> Advice:
    """The best settings after one change may not be the best after the next: a bucket size may
    be changed twice.
    """
    now = best = predict(profile, cluster, settings)
    chosen = settings
    changes: list[Change] = []
    while len(changes) < MOST_CHANGES:
        others = _changes(profile, cluster, chosen, settings)
        tried = [(predict(profile, cluster, other), words, other) for words, other in others]
        step, words, other = min(tried, key=lambda each: each[0].seconds)
        saves = (best.seconds - step.seconds) / now.seconds
        if saves < WORTH:
            break
        changes.append(Change(words, saves))
        best, chosen = step, other
    fast = replace(cluster, network=cluster.network.faster(2), node=cluster.node)
    if cluster.num_nodes == 1:
        fast = replace(cluster, node=cluster.node.faster(2))
    faster = 1 - predict(profile, fast, settings).seconds / now.seconds
    return Advice(now, tuple(changes), best, chosen, faster, profile.phases.data / now.seconds)


def _changes(
    profile: Profile, cluster: Cluster, settings: Settings, asked: Settings
) -> Iterator[tuple[str, Settings]]:
    if settings.compression is None and any(
        gradient.dtype == "float32" for gradient in profile.gradients
    ):
        yield "compression='bf16'", replace(settings, compression="bf16")
    for topology in ("auto", "flat"):
        other = replace(settings, topology=topology)
        if nests(profile, cluster, other) != nests(profile, cluster, settings):
            yield f"topology={topology!r}", other
    if not settings.shard_optimizer:
        yield "shard_optimizer=True", replace(settings, shard_optimizer=True)
    for cap in CAPS_MB:
        again = settings.bucket_cap_mb is not None and settings.bucket_cap_mb != asked.bucket_cap_mb
        before = f" instead of {settings.bucket_cap_mb:g}" if again else ""
        yield f"bucket_cap_mb={cap:g}{before}", replace(settings, bucket_cap_mb=cap)


def in_words(advice: Advice) -> str:
    now, then = advice.now, advice.then
    share = now.exposed / now.seconds
    head = f"on {now.world_size:,} ranks {share:.0%} of a step waits for communication"
    if not advice.changes:
        text = f"{head}; no argument of RingStrategy would save 1 %"
    else:
        first, *others = advice.changes
        parts = [f"{first.argument} saves most ({first.saves:.0%} of the step)"]
        parts += [f"{change.argument} ({change.saves:.0%} more)" for change in others]
        efficiency = f"efficiency {now.efficiency:.0%} becomes {then.efficiency:.0%}"
        text = f"{head}: {', then '.join(parts)}; {efficiency}"
    if advice.faster_link >= WORTH:
        text += (
            ". A network twice as fast, with nothing else changed, would save "
            f"{advice.faster_link:.0%}"
        )
    if advice.data > max(share, WORTH):
        text += f". {advice.data:.0%} of the step waits for data, which is more: ask GapMeter why"
    return text + "."
