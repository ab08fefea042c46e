"""One training step on N ranks, predicted: buckets follow each other through the wire while
backward goes on.

A collective costs what `comm.cost` says. A bucket enters the wire when its last gradient is there
and the bucket before it has left (the model of MG-WFBP, Shi et al. 2019, arXiv:1811.11141). What is
not over when backward ends is exposed. Nested rings are three queues, which the pieces of a bucket
pass one after the other. Sharded, all-gathers start after the step in the order of use; forward is
assumed to be backward mirrored, and stops where a parameter is missing.

Cores that compute while they should send are not in the model: a collective among busy CPUs takes
longer than α says. ``python -m benchmarks.step.plan`` compares predictions with runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_ring.comm import cost
from lightning_ring.tools.plan.inputs import Gradient, Link, Profile

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Cluster:
    """``world_size`` ranks, ``ranks_per_node`` consecutive ones on each node, or all on one."""

    world_size: int
    ranks_per_node: int
    network: Link
    node: Link

    @property
    def num_nodes(self) -> int:
        return -(-self.world_size // self.ranks_per_node)

    @property
    def local_size(self) -> int:
        return min(self.world_size, self.ranks_per_node)


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of `RingStrategy` that the prediction depends on. ``sixteen_bits`` are bf16 or
    fp16, which send the same bytes. ``local_steps`` are those of ``LocalSGD``.
    """

    sharded: bool = False
    sixteen_bits: bool = False
    bucket_cap_mb: float | None = None
    local_steps: int | None = None


Bucket = tuple[list[Gradient], float]
"""Gradients that travel together, in the order in which backward produces them, and their bytes."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Seconds of a step; of those, what waits for communication; and a step without any."""

    world_size: int
    seconds: float
    exposed: float
    alone: float

    @property
    def efficiency(self) -> float:
        """Images per second of a rank, relative to one that trains alone."""
        return self.alone / self.seconds


def predict(profile: Profile, cluster: Cluster, settings: Settings) -> PredictedStep:
    """A step of ``profile``'s model on ``cluster``."""
    phases, size = profile.phases, cluster.world_size
    exposed = saved = 0.0
    # On CPUs `RingStrategy` takes a ring in each node and rings across nodes.
    nested = profile.run.device == "cpu" and cluster.num_nodes > 1 and cluster.local_size > 1
    wire = partial(_ends, cluster, nested)
    cap = settings.bucket_cap_mb or cost.default_cap_mb(profile.run.device, size)
    buckets = cut_buckets(profile.gradients, cap, settings.sixteen_bits)
    leave = [(members[-1].ready, num_bytes) for members, num_bytes in buckets]
    if size > 1 and settings.local_steps:
        parameters = sum(gradient.num_bytes for gradient in profile.gradients)
        exposed = wire("all_reduce", [(0.0, parameters)])[-1] / settings.local_steps
    elif size > 1 and settings.sharded:
        # which parameters some rank used travels after the last bucket, 4 bytes for each
        link = cluster.network if cluster.num_nodes > 1 else cluster.node
        flags = link.seconds("all_reduce", 4 * len(profile.gradients), size)
        exposed = max(0.0, wire("reduce_scatter", leave)[-1] + flags - phases.backward)
        gathered = wire("all_gather", [(0.0, num_bytes) for _, num_bytes in reversed(leave)])
        exposed += _delay_of_forward(profile, zip(gathered, reversed(buckets), strict=True))
        saved = phases.optimizer * (1 - 1 / size)
    elif size > 1:
        exposed = max(0.0, wire("all_reduce", leave)[-1] - phases.backward)
    return PredictedStep(size, phases.alone - saved + exposed, exposed, phases.alone)


def cut_buckets(gradients: Sequence[Gradient], cap_mb: float, sixteen_bits: bool) -> list[Bucket]:
    """As `plan_buckets` cuts them: one dtype to a bucket, in the order in which they can leave."""
    found: list[Bucket] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        members = [gradient for gradient in gradients if gradient.dtype == dtype]
        sizes = [gradient.num_bytes for gradient in members]
        numbers = cost.number_by_size(sizes, cap_mb * MIB, cost.FIRST_BUCKET_MB * MIB)
        share = 0.5 if sixteen_bits and dtype == "float32" else 1.0
        for number in dict.fromkeys(numbers):
            own = [one for one, its in zip(members, numbers, strict=True) if its == number]
            found.append((own, share * sum(one.num_bytes for one in own)))
    positions = {gradient.name: position for position, gradient in enumerate(gradients)}
    return sorted(found, key=lambda bucket: positions[bucket[0][-1].name])


def _ends(
    cluster: Cluster, nested: bool, collective: str, messages: Iterable[tuple[float, float]]
) -> list[float]:
    """When each of ``messages``, seconds at which it is ready and bytes, is over. They pass through
    stages, each of which takes one at a time, first in, first out.
    """
    local, nodes = cluster.local_size, cluster.num_nodes
    stages = [_flat_stage(collective, cluster)]
    if nested:
        # a rank sends 1/local size across, over a link that it shares with as many
        inward = partial(cluster.node.seconds, "reduce_scatter", num_ranks=local)
        outward = partial(cluster.node.seconds, "all_gather", num_ranks=local)
        stages = [partial(cluster.network.seconds, collective, num_ranks=nodes)]
        stages = [inward] * (collective != "all_gather") + stages
        stages += [outward] * (collective != "reduce_scatter")
    free, ends = [0.0] * len(stages), []
    for ready, num_bytes in messages:
        cut = nested and collective == "all_reduce"
        pieces = cost.num_nested_pieces(num_bytes, local, nodes) if cut else 1
        for _ in range(pieces):
            at = ready
            for index, seconds in enumerate(stages):
                at = free[index] = max(at, free[index]) + seconds(num_bytes / pieces)
        ends.append(free[-1])
    return ends


def _flat_stage(collective: str, cluster: Cluster) -> Callable[[float], float]:
    """One ring through the ranks in order. Of the hops of a message as many cross the network as
    there are nodes but one, as NCCL counts them (src/graph/tuning.cc); the slower link sets the
    pace of the bytes."""
    size, nodes = cluster.world_size, cluster.num_nodes
    if nodes == 1:
        return partial(cluster.node.seconds, collective, num_ranks=size)
    network, node = cluster.network.costs[collective], cluster.node.costs[collective]
    hops = (nodes - 1) * network.alpha_seconds + (size - nodes) * node.alpha_seconds
    slow = node.bandwidth if cluster.local_size > 1 else math.inf
    bandwidth, passes = min(network.bandwidth, slow), cost.PASSES[collective]
    return lambda num_bytes: passes * (hops + (size - 1) / size * num_bytes / bandwidth)


def _delay_of_forward(profile: Profile, gathered: Iterable[tuple[float, Bucket]]) -> float:
    """How long forward waits for parameters, ``gathered`` at these times after the optimizer.

    Forward is backward run the other way: the parameter whose gradient came last is needed first,
    and the times between them keep their proportion.
    """
    phases = profile.phases
    between = phases.data + phases.copy + phases.other
    arrival = {one.name: at for at, (members, _) in gathered for one in members}
    delay = 0.0
    for gradient in sorted(profile.gradients, key=lambda gradient: -gradient.ready):
        left = 1 - gradient.ready / phases.backward if phases.backward else 0.0
        needed = between + phases.forward * max(0.0, left) + delay
        delay += max(0.0, arrival[gradient.name] - needed)
    return delay


def world_sizes(ranks_per_node: int, most: int = 10_000) -> list[int]:
    """1, 2, 4, ... ranks of one node, then 1, 2, 4, ... nodes, then ``most`` ranks."""
    powers = [1 << power for power in range(14)]
    in_a_node = {size for size in powers if size <= ranks_per_node}
    nodes = {size * ranks_per_node for size in powers if size * ranks_per_node <= most}
    return sorted(in_a_node | nodes | {max(1, most // ranks_per_node) * ranks_per_node})
