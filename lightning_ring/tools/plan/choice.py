"""Which compressor or algorithm to use: each one's step predicted, and the gentlest of the fast
ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from lightning_ring.algorithms.exchanges import EXCHANGES, AllReduce, Direct, Exchange
from lightning_ring.comm.cost import CostModel
from lightning_ring.gradients.compression.registry import COMPRESSORS
from lightning_ring.tools.plan.model import (
    Cluster,
    PredictedStep,
    Settings,
    cluster_seconds,
    nests,
    predict,
    processor_seconds,
    wire_bytes,
)
from lightning_ring.tools.plan.profile import Profile

# times the fastest step, within which a choice that changes the training less is the better one
NEARLY = 1.1
WORTH = 0.95  # of the step without any, or it is not worth it
# from those that change a training least; "fp32" is for parameters of 16 bits
COMPRESSIONS = ("bf16", "fp16", "int8", "powersgd", "onebit", "topk", "terngrad", "dgc")


@dataclass(frozen=True, slots=True)
class Choice:
    """An argument of `RingStrategy`, as Python; ``num_bytes`` are those that a host sends a
    step, in the mean.
    """

    argument: str
    step: PredictedStep
    num_bytes: float


def choices(profile: Profile, cluster: Cluster, settings: Settings) -> list[Choice]:
    """Nothing, every compressor and every algorithm under ``settings``; what changes the
    training least comes first.
    """
    plain = replace(settings, compression=None, shard_optimizer=False)
    found = [_compressed(profile, cluster, plain, None)]
    shapes = all(gradient.shape is not None for gradient in profile.gradients)
    if any(gradient.dtype == "float32" for gradient in profile.gradients):
        names = [
            name for name in COMPRESSIONS if COMPRESSORS[name].wire_bytes is not None or shapes
        ]
        found += [_compressed(profile, cluster, plain, name) for name in names]
    for written, exchange in EXCHANGES.items():
        step = predict_exchange(profile, cluster, plain, exchange)
        found.append(
            Choice(f"algorithm={written}", step, sent_bytes(profile, cluster, plain, exchange))
        )
    return found


def recommended(found: Sequence[Choice]) -> Choice:
    """The first whose step takes hardly longer than the fastest one's, if that is worth it."""
    fastest = min(choice.step.seconds for choice in found)
    if fastest > WORTH * found[0].step.seconds:
        return found[0]
    return next(choice for choice in found if choice.step.seconds <= NEARLY * fastest)


@dataclass(frozen=True, slots=True)
class Paces:
    """Seconds of a step of ranks that wait for exchanges, and of those that answer; all wait where
    nobody answers.

    Attributes:
        messages: In a step of a rank that waits.
    """

    asking: float
    answering: float
    messages: float


def predict_exchange(
    profile: Profile, cluster: Cluster, settings: Settings, exchange: Exchange
) -> PredictedStep:
    """A step, in the mean over the ranks, that step alone and send what ``exchange`` says."""
    alone, size = profile.phases.alone, cluster.world_size
    if size == 1:
        return PredictedStep(1, alone, 0.0, 0.0, alone)
    paces = predict_paces(profile, cluster, settings, exchange)
    seconds = _mean(paces, size, exchange)
    took = (
        paces.messages
        * seconds
        / paces.asking
        * _of_a_part(profile, cluster, settings, exchange)[0]
    )
    return PredictedStep(size, seconds, seconds - alone, took, alone)


def predict_paces(
    profile: Profile, cluster: Cluster, settings: Settings, exchange: Exchange
) -> Paces:
    """Of ranks of ``profile``, which are all alike; at least two."""
    if exchange.asking is not None:
        return _own_paces(profile, cluster, settings, exchange)
    phases, size = profile.phases, cluster.world_size
    gradients = 0.0
    if exchange.in_nodes and nests(profile, cluster, settings):
        node = Cluster(cluster.local_size, cluster.local_size, cluster.node, cluster.node)
        gradients = predict(profile, node, settings).exposed
    took, work = _of_a_part(profile, cluster, settings, exchange)
    hidden = exchange.hidden_steps * phases.alone
    # else cores compute, and the threads of a message get them when the batch is over
    if profile.call is None:
        hidden += sum(getattr(phases, name) for name in exchange.hidden_phases)
    messages = exchange.parts * exchange.copies / exchange.every
    waits = gradients + messages * max(0.0, took - hidden, work)
    waits += (
        exchange.rounds * messages / (exchange.parts * exchange.copies) * profile.call_beside_link
    )
    if exchange.optimizer_steps is not None:
        waits += (exchange.optimizer_steps(size) - 1) * phases.optimizer
    seconds = phases.alone + waits + _seconds_to_copy(profile, cluster, exchange)
    return Paces(seconds, seconds, messages)


def _own_paces(profile: Profile, cluster: Cluster, settings: Settings, exchange: Exchange) -> Paces:
    """Some ranks ask others, whose threads answer beside their batches."""
    assert isinstance(exchange.traffic, Direct)
    took, asks = _of_a_part(profile, cluster, settings, exchange)
    numel, answers = _num_values(profile), asks
    copies = _seconds_to_copy(profile, cluster, exchange)
    if profile.questions is not None:
        asks = profile.questions.asking * 4 * numel
        answers = profile.questions.answering * exchange.traffic.sent_bytes(
            numel, cluster.world_size, 1
        )
        # the threads that answer share a core with the batch, which has half of it
        took = max(took + exchange.rounds * profile.call_beside_link, 2 * answers)
    step = profile.phases.alone + copies
    # an exchange at every step, or at the first one behind an exchange that takes several
    steps = min(max(1.0, (took + copies - asks) / step), exchange.hidden_steps + 1)
    whole = max(steps * step + asks, took + copies)
    return Paces(whole / steps, step / (1 - answers / whole), 1 / steps)


def _seconds_to_copy(profile: Profile, cluster: Cluster, exchange: Exchange) -> float:
    """And to add, all parameters in the memory of a rank, at each step."""
    passes = exchange.passes(cluster.world_size) if exchange.passes is not None else 0.0
    return passes * 4 * _num_values(profile) * (profile.copying or 0.0)


def _mean(paces: Paces, size: int, exchange: Exchange) -> float:
    asking = exchange.asking(size) if exchange.asking is not None else 1.0
    return 1 / (asking / paces.asking + (1 - asking) / paces.answering)


def _of_a_part(
    profile: Profile, cluster: Cluster, settings: Settings, exchange: Exchange
) -> tuple[float, float]:
    """Seconds of a message, and those of them that a processor works."""
    numel, size = _num_values(profile), cluster.world_size
    if isinstance(exchange.traffic, AllReduce):
        message = exchange.traffic.num_bytes(numel, size) / exchange.parts
        coded = (
            (profile.encoding or {}).get(exchange.traffic.compressor or "", 0.0)
            * numel
            / exchange.parts
        )
        took = cluster_seconds(profile, cluster, settings, message) + coded
        return took, coded + processor_seconds(profile, message)
    cost = _of_a_message((cluster.network if cluster.num_nodes > 1 else cluster.node).costs)
    on_host = cluster.local_size if cluster.num_nodes > 1 else 1
    took = exchange.traffic.num_messages * cost.alpha_seconds
    took += exchange.traffic.passing_bytes(numel, size, on_host) / cost.bandwidth
    ring = exchange.traffic.sent_bytes(numel, size, 1) * size / (2 * (size - 1))  # of as many bytes
    return took, processor_seconds(profile, ring)


def _of_a_message(costs: Mapping[str, CostModel]) -> CostModel:
    """From rank to rank. All collectives send over the same link: the median is that which was
    disturbed least.
    """
    alphas, bandwidths = zip(
        *((cost.alpha_seconds, cost.bandwidth) for cost in costs.values()), strict=True
    )
    return CostModel(median(alphas), median(bandwidths))


def sent_bytes(profile: Profile, cluster: Cluster, settings: Settings, exchange: Exchange) -> float:
    """Of a step, in the mean, by the host that sends most."""
    numel, size = _num_values(profile), cluster.world_size
    if isinstance(exchange.traffic, AllReduce):
        num_bytes = exchange.copies * exchange.traffic.num_bytes(numel, size)
        return _sent(num_bytes, _ring_size(profile, cluster, settings)) / exchange.every
    on_host = cluster.local_size if cluster.num_nodes > 1 else 1
    paces = predict_paces(profile, cluster, settings, exchange)
    a_step = paces.messages * _mean(paces, size, exchange) / paces.asking / exchange.parts
    return a_step * exchange.traffic.sent_bytes(numel, size, on_host)


def _num_values(profile: Profile) -> int:
    """Of float32, as long as the parameters, which are sent in their own dtype."""
    return sum(gradient.num_bytes for gradient in profile.gradients) // 4


def lines(found: Sequence[Choice]) -> Iterator[str]:
    """A table, and what is recommended."""
    size, first, best = found[0].step.world_size, found[0], recommended(found)
    yield (
        f"compressors and algorithms on {size:,} ranks (a gain in time may cost accuracy: "
        "docs/guides/slow-links.md)"
    )
    yield f"{'':54}  {'step ms':>8} {'of ring':>7} {'MB/host':>8}"
    for choice in found:
        share = choice.step.seconds / first.step.seconds
        mark = " <" if choice is best else ""
        seconds, sent = 1e3 * choice.step.seconds, choice.num_bytes / 1e6
        yield f"{choice.argument:54}  {seconds:>8.1f} {share:>7.2f} {sent:>8.3f}{mark}"
    if best is first:
        yield f"recommended: {first.argument}; no other saves {1 - WORTH:.0%}."
    else:
        share = best.step.seconds / first.step.seconds
        yield (
            f"recommended: RingStrategy({best.argument}), {share:.2f} of the time of "
            f"{first.argument}: of those within {NEARLY - 1:.0%} of the fastest the one that "
            "changes the training least."
        )


def _compressed(
    profile: Profile, cluster: Cluster, plain: Settings, compression: str | None
) -> Choice:
    settings = replace(plain, compression=compression)
    size = _ring_size(profile, cluster, plain)
    num_bytes = sum(wire_bytes(gradient, compression, size) for gradient in profile.gradients)
    argument = "no compression" if compression is None else f"compression={compression!r}"
    return Choice(argument, predict(profile, cluster, settings), _sent(num_bytes, size))


def _ring_size(profile: Profile, cluster: Cluster, settings: Settings) -> int:
    """Of the ring, or of the rings together, that go through a host's link."""
    return cluster.num_nodes if nests(profile, cluster, settings) else cluster.world_size


def _sent(num_bytes: float, ring_size: int) -> float:
    return 2 * (ring_size - 1) / ring_size * num_bytes
