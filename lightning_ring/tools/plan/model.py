"""One training step on N ranks, predicted: buckets follow each other through the wire while
backward goes on.

A collective costs what `comm.cost` says. A bucket enters the wire when its last gradient is there
and the bucket before it has left (the model of MG-WFBP, Shi et al. 2019, arXiv:1811.11141). What is
not over when backward ends is exposed.

- One ring over several nodes goes at the pace of the slower link, and each hop has its own latency.
  Nested rings are three queues, which the pieces of a bucket pass one after the other.
- Sharded: reduce-scatters end backward, the step takes 1/N, then all-gathers start in the order of
  use. Forward is assumed to be backward mirrored, and stops where a parameter is missing.
- 16 bits halve the bytes of float32. ``LocalSGD(k)`` pays one all-reduce of the parameters in k
  steps.
- Cores that compute while they should send are not in the model: a collective among busy CPUs takes
  longer than α says. ``benchmarks/step/plan.py`` compares predictions with runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_ring.comm.cost import (
    FIRST_BUCKET_MB,
    CostModel,
    default_cap_mb,
    num_nested_pieces,
    number_by_size,
)
from lightning_ring.tools.plan.profile import Gradient, Profile

MIB = 2**20
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}

Seconds = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs, by collective; bandwidth is a rank's inside a node, and a whole
    host's between nodes.
    """

    name: str
    costs: Mapping[str, CostModel]
    residual: float = 0.0  # the largest of the fit, in relative terms

    @classmethod
    def of(cls, name: str, cost: CostModel) -> Link:
        return cls(name, dict.fromkeys(_PASSES, cost))

    def seconds(self, collective: str, num_bytes: float, num_ranks: int) -> float:
        return self.costs[collective].seconds(num_bytes, num_ranks, collective)


@dataclass(frozen=True, slots=True)
class Cluster:
    """``world_size`` ranks, ``ranks_per_node`` consecutive ones on each node; fewer than that
    are on one node.
    """

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
    """The arguments of `RingStrategy` that the prediction depends on.

    Attributes:
        sixteen_bits: ``compression="bf16"`` or ``"fp16"``, which send the same bytes.
        bucket_cap_mb: `None`: the default, which depends on device and number of ranks.
        local_steps: Of ``LocalSGD``; `None`: gradients are averaged at every step.
    """

    topology: str = "auto"
    sharded: bool = False
    sixteen_bits: bool = False
    bucket_cap_mb: float | None = None
    local_steps: int | None = None


@dataclass(slots=True)
class PlannedBucket:
    """Gradients that travel together; it is ready when the last of them is."""

    members: list[Gradient] = field(default_factory=list)
    num_bytes: float = 0.0
    ready: float = 0.0


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


def nests(profile: Profile, cluster: Cluster, settings: Settings) -> bool:
    """Whether `RingStrategy` takes a ring in each node and rings across nodes."""
    several = cluster.num_nodes > 1 and cluster.local_size > 1
    return several and settings.topology != "flat" and profile.run.device == "cpu"


def predict(profile: Profile, cluster: Cluster, settings: Settings) -> PredictedStep:
    """A step of ``profile``'s model on ``cluster``."""
    alone, size = profile.phases.alone, cluster.world_size
    if size == 1:
        return PredictedStep(1, alone, 0.0, alone)
    nested = nests(profile, cluster, settings)
    if profile.run.device == "cpu" and cluster.num_nodes > 1 and not nested:
        # one ring over several nodes uses TCP inside a node as well
        cluster = replace(cluster, node=cluster.network)
    if settings.local_steps is not None:
        parameters = sum(gradient.num_bytes for gradient in profile.gradients)
        exposed = _Wire("all_reduce", cluster, nested).send(0.0, parameters)
        exposed /= settings.local_steps
        return PredictedStep(size, alone + exposed, exposed, alone)
    cap = settings.bucket_cap_mb or default_cap_mb(profile.run.device, size)
    buckets = cut_buckets(profile.gradients, cap, settings.sixteen_bits)
    if settings.sharded:
        exposed = _exposed_sharded(profile, cluster, nested, buckets)
        optimizer = profile.phases.optimizer
        seconds = alone - optimizer + optimizer / size + exposed
        return PredictedStep(size, seconds, exposed, alone)
    reduced = _Wire("all_reduce", cluster, nested)
    for bucket in buckets:
        reduced.send(bucket.ready, bucket.num_bytes)
    exposed = max(0.0, reduced.free - profile.phases.backward)
    return PredictedStep(size, alone + exposed, exposed, alone)


def _exposed_sharded(
    profile: Profile, cluster: Cluster, nested: bool, buckets: Sequence[PlannedBucket]
) -> float:
    scattered = _Wire("reduce_scatter", cluster, nested)
    for bucket in buckets:
        scattered.send(bucket.ready, bucket.num_bytes)
    # which parameters some rank used travels after the last bucket, 4 bytes for each
    link = cluster.network if cluster.num_nodes > 1 else cluster.node
    flags = link.seconds("all_reduce", 4 * len(profile.gradients), cluster.world_size)
    late = max(0.0, scattered.free + flags - profile.phases.backward)
    return late + _delay_of_forward(profile, buckets, _Wire("all_gather", cluster, nested))


def cut_buckets(
    gradients: Sequence[Gradient], cap_mb: float, sixteen_bits: bool
) -> list[PlannedBucket]:
    """As `gradients.bucket.plan_buckets` cuts them: one dtype to a bucket, in the order in which
    they can leave.
    """
    numbered: list[tuple[int, PlannedBucket]] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        members = [pair for pair in enumerate(gradients) if pair[1].dtype == dtype]
        sizes = [gradient.num_bytes for _, gradient in members]
        numbers = number_by_size(sizes, cap_mb * MIB, FIRST_BUCKET_MB * MIB)
        share = 0.5 if sixteen_bits and dtype == "float32" else 1.0
        buckets: dict[int, tuple[int, PlannedBucket]] = {}
        for number, (position, gradient) in zip(numbers, members, strict=True):
            bucket = buckets.get(number, (0, PlannedBucket()))[1]
            bucket.members.append(gradient)
            bucket.num_bytes += share * gradient.num_bytes
            bucket.ready = max(bucket.ready, gradient.ready)
            buckets[number] = position, bucket
        numbered += buckets.values()
    return [bucket for _, bucket in sorted(numbered, key=lambda pair: pair[0])]


class _Wire:
    """A collective's stages, each of which takes one message at a time, first in, first out."""

    def __init__(self, collective: str, cluster: Cluster, nested: bool) -> None:
        flat = [] if nested else [_flat_stage(collective, cluster)]
        self._stages = _nested_stages(collective, cluster) if nested else flat
        self._cut = nested and collective == "all_reduce"
        self._cluster = cluster
        self._free = [0.0] * len(self._stages)

    @property
    def free(self) -> float:
        """When the last stage has sent all messages."""
        return self._free[-1]

    def send(self, ready: float, num_bytes: float) -> float:
        """When a message is over that could be sent at ``ready``."""
        pieces = 1
        if self._cut:
            cluster = self._cluster
            pieces = num_nested_pieces(num_bytes, cluster.local_size, cluster.num_nodes)
        for _ in range(pieces):
            at = ready
            for index, seconds in enumerate(self._stages):
                at = max(at, self._free[index]) + seconds(num_bytes / pieces)
                self._free[index] = at
        return self.free


def _nested_stages(collective: str, cluster: Cluster) -> Sequence[Seconds]:
    """`comm.hierarchical`: a rank sends 1/local size of the tensor across, over a link that it
    shares with as many.
    """
    local, nodes = cluster.local_size, cluster.num_nodes
    inward = partial(cluster.node.seconds, "reduce_scatter", num_ranks=local)
    across = partial(cluster.network.seconds, collective, num_ranks=nodes)
    outward = partial(cluster.node.seconds, "all_gather", num_ranks=local)
    stages = {
        "all_reduce": [inward, across, outward],
        "reduce_scatter": [inward, across],
        "all_gather": [across, outward],
    }
    return stages[collective]


def _flat_stage(collective: str, cluster: Cluster) -> Seconds:
    """One ring through the ranks in order. Of the hops of a message as many cross the network as
    there are nodes but one, as NCCL counts them (src/graph/tuning.cc); the slower link sets the
    pace of the bytes."""
    size, nodes = cluster.world_size, cluster.num_nodes
    if nodes == 1:
        return lambda num_bytes: cluster.node.seconds(collective, num_bytes, size)
    network, node = cluster.network.costs[collective], cluster.node.costs[collective]
    passes = _PASSES[collective]
    latency = passes * ((nodes - 1) * network.alpha_seconds + (size - nodes) * node.alpha_seconds)
    bandwidth = (
        network.bandwidth if cluster.local_size == 1 else min(network.bandwidth, node.bandwidth)
    )
    return lambda num_bytes: latency + passes * (size - 1) / size * num_bytes / bandwidth


def _delay_of_forward(profile: Profile, buckets: Sequence[PlannedBucket], wire: _Wire) -> float:
    """How long forward waits for parameters, which set out when the optimizer has ended.

    Forward is taken for backward run the other way: the parameter whose gradient came last is
    needed first, and the times between them keep their proportion.
    """
    phases = profile.phases
    between = phases.data + phases.copy + phases.other
    arrival: dict[str, float] = {}
    for bucket in reversed(buckets):
        arrived = wire.send(0.0, bucket.num_bytes)
        arrival |= dict.fromkeys((member.name for member in bucket.members), arrived)
    delay = 0.0
    for gradient in sorted(profile.gradients, key=lambda gradient: -gradient.ready):
        left = 1 - gradient.ready / phases.backward if phases.backward else 0.0
        needed = between + phases.forward * max(0.0, left) + delay
        delay += max(0.0, arrival[gradient.name] - needed)
    return delay


def world_sizes(ranks_per_node: int, most: int = 10_000) -> list[int]:
    """1, 2, 4, ... ranks of one node, then 1, 2, 4, ... nodes, then as many nodes as hold
    ``most`` ranks.
    """
    sizes = _powers(1, ranks_per_node) + _powers(ranks_per_node, most)
    return sorted({*sizes, max(1, most // ranks_per_node) * ranks_per_node})


def _powers(first: int, most: int) -> list[int]:
    sizes = [first << power for power in range(most.bit_length())]
    return [size for size in sizes if size <= most]
