"""One training step on N ranks, predicted: buckets follow each other through the wire while
backward goes on.

A collective costs what `comm.cost` says. A bucket enters the wire when its last gradient is there
and the bucket before it has left (the model of MG-WFBP, Shi et al. 2019, arXiv:1811.11141). What is
not over when backward ends is exposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from lightning_ring.comm.cost import (
    FIRST_BUCKET_MB,
    CostModel,
    default_cap_mb,
    num_nested_pieces,
    number_by_size,
)
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression.registry import COMPRESSORS
from lightning_ring.tools.plan.profile import Gradient, Profile

MIB = 2**20
COMPRESSOR_NAMES = tuple(COMPRESSORS)
_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}

Seconds = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Link:
    """What a message costs, by collective; bandwidth is a rank's inside a node, and a whole
    host's between nodes.
    """

    name: str
    costs: Mapping[str, CostModel]

    @classmethod
    def of(cls, name: str, cost: CostModel) -> Link:
        return cls(name, dict.fromkeys(_PASSES, cost))

    def faster(self, times: float) -> Link:
        """The same with so many times the bandwidth."""
        costs = {
            key: CostModel(cost.alpha_seconds, cost.bandwidth * times)
            for key, cost in self.costs.items()
        }
        return Link(self.name, costs)

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
    """The arguments of `RingStrategy` that the prediction depends on."""

    topology: str = "auto"
    shard_optimizer: bool = False
    compression: str | None = None
    bucket_cap_mb: float | None = None
    """`None`: the default, which depends on device and number of ranks."""


@dataclass(slots=True)
class PlannedBucket:
    """Gradients that travel together: bytes in their own dtype and on the wire, and the time of
    the last gradient.
    """

    members: list[Gradient] = field(default_factory=list)
    num_bytes: int = 0
    wire_bytes: float = 0.0
    ready: float = 0.0


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """Seconds of a step and, of those, what communication takes: waits, and the work of a
    compressor.

    ``communication`` is all of it, hidden or exposed; ``alone`` a step without any.
    """

    world_size: int
    seconds: float
    exposed: float
    communication: float
    alone: float

    @property
    def efficiency(self) -> float:
        """Images per second of a rank, relative to one that trains alone."""
        return self.alone / self.seconds


def num_rounds(settings: Settings) -> int:
    """Collectives of a bucket, each of which waits for the one before."""
    return COMPRESSORS[settings.compression].rounds if settings.compression is not None else 1


def num_collectives(settings: Settings) -> int:
    """Of a bucket, with that of its flags."""
    return (
        COMPRESSORS[settings.compression].num_collectives if settings.compression is not None else 1
    )


def processor_seconds(profile: Profile, num_bytes: float) -> float:
    """Of an all-reduce that a rank's cores, all of which compute, cannot do beside that."""
    return (profile.processor or 0.0) * num_bytes


def cluster_seconds(
    profile: Profile, cluster: Cluster, settings: Settings, num_bytes: float
) -> float:
    """An all-reduce of ``num_bytes`` at the end of a step, as `RingStrategy` does it."""
    nested = nests(profile, cluster, settings)
    return _Wire("all_reduce", _as_connected(profile, cluster, nested), nested).send(0.0, num_bytes)


def _as_connected(profile: Profile, cluster: Cluster, nested: bool) -> Cluster:
    if profile.run.device == "cpu" and cluster.num_nodes > 1 and not nested:
        # inside a node, too, one ring over all ranks talks TCP
        return replace(cluster, node=cluster.network)
    return cluster


def nests(profile: Profile, cluster: Cluster, settings: Settings) -> bool:
    """Whether ranks take a ring in each node and rings across nodes, as `RingStrategy` decides
    it.
    """
    several = cluster.num_nodes > 1 and cluster.local_size > 1
    return several and (
        settings.topology == "hierarchical"
        or (settings.topology == "auto" and profile.run.device == "cpu")
    )


def predict(profile: Profile, cluster: Cluster, settings: Settings) -> PredictedStep:
    """A step of ``profile``'s model on ``cluster``."""
    phases = profile.phases
    if cluster.world_size == 1:
        return PredictedStep(1, phases.alone, 0.0, 0.0, phases.alone)
    nested = nests(profile, cluster, settings)
    cluster = _as_connected(profile, cluster, nested)
    cap = settings.bucket_cap_mb or default_cap_mb(profile.run.device, cluster.world_size)
    only_across = (
        nested
        and settings.compression is not None
        and COMPRESSORS[settings.compression].between_nodes
    )
    group = cluster.num_nodes if only_across else cluster.world_size
    buckets = cut_buckets(profile.gradients, cap, settings.compression, group)
    between = phases.data + phases.copy + phases.other
    if not settings.shard_optimizer:
        reduced = _Wire("all_reduce", cluster, nested)
        # an element, to encode and to decode
        half = (profile.encoding or {}).get(settings.compression or "", 0.0) / 2
        coded = [half * sum(gradient.numel for gradient in bucket.members) for bucket in buckets]
        encoded = 0.0  # by the thread that runs backward
        ends = []
        for bucket, seconds in zip(buckets, coded, strict=True):
            encoded += seconds
            inside = bucket.num_bytes if only_across else None
            ends.append(reduced.send(bucket.ready + encoded, bucket.wire_bytes, inside=inside))
        over = phases.backward + encoded
        # a bucket's first collective leaves when it is ready, its others when somebody waits for
        # the bucket
        others = (num_rounds(settings) - 1) * profile.call_beside_link
        for end, seconds in zip(ends, coded, strict=True):
            over = max(over, end) + others + seconds
        sent = sum(bucket.wire_bytes for bucket in buckets)
        over += profile.call_beside_link  # of the last bucket
        # cores that compute hide no work of theirs; calls, whose threads wait for a core, count as
        # such
        calls = len(buckets) * num_collectives(settings) * (profile.call or 0.0)
        exposed = max(
            over - phases.backward, 2 * sum(coded) + processor_seconds(profile, sent) + calls
        )
        return PredictedStep(
            cluster.world_size, phases.alone + exposed, exposed, reduced.busy, phases.alone
        )
    scattered = _Wire("reduce_scatter", cluster, nested)
    for bucket in buckets:
        scattered.send(bucket.ready, bucket.wire_bytes)
    # which parameters some rank used travels behind the last bucket, 4 bytes for each
    flags = cluster.network if cluster.num_nodes > 1 else cluster.node
    flags_seconds = flags.seconds("all_reduce", 4 * len(profile.gradients), cluster.world_size)
    exposed = (
        max(0.0, scattered.free + flags_seconds - phases.backward) + 2 * profile.call_beside_link
    )
    gathered = _Wire("all_gather", cluster, nested)
    delay = _delay_of_forward(profile, buckets, gathered, between)
    shorter = phases.optimizer * (1 - 1 / cluster.world_size)
    busy = scattered.busy + flags_seconds + gathered.busy
    waits = exposed + delay
    return PredictedStep(
        cluster.world_size, phases.alone - shorter + waits, waits, busy, phases.alone
    )


def cut_buckets(
    gradients: Sequence[Gradient], cap_mb: float, compression: str | None, world_size: int
) -> list[PlannedBucket]:
    """As `gradients.bucket.plan_buckets` cuts them: one dtype to a bucket, in the order in which
    they can leave.
    """
    numbered: list[tuple[int, PlannedBucket]] = []
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        members = [
            (at, gradient) for at, gradient in enumerate(gradients) if gradient.dtype == dtype
        ]
        numbers = number_by_size(
            [gradient.num_bytes for _, gradient in members], cap_mb * MIB, FIRST_BUCKET_MB * MIB
        )
        buckets: dict[int, tuple[int, PlannedBucket]] = {}
        for number, (position, gradient) in zip(numbers, members, strict=True):
            bucket = buckets.get(number, (0, PlannedBucket()))[1]
            bucket.members.append(gradient)
            bucket.num_bytes += gradient.num_bytes
            bucket.wire_bytes += wire_bytes(gradient, compression, world_size)
            bucket.ready = max(bucket.ready, gradient.ready)
            buckets[number] = position, bucket
        numbered += buckets.values()
    return [bucket for _, bucket in sorted(numbered, key=lambda pair: pair[0])]


def wire_bytes(gradient: Gradient, compression: str | None, world_size: int) -> float:
    """Size of ``gradient``'s part of a message, as `Compressor.wire_bytes` counts it."""
    if compression is None or gradient.dtype != "float32":
        return gradient.num_bytes
    known = COMPRESSORS[compression]
    if known.wire_bytes is not None:
        return known.wire_bytes(gradient.numel, world_size)
    if known.shape_bytes is None or gradient.shape is None:
        raise ConfigurationError(
            f"what compression {compression!r} sends follows from the gradients' shapes, which "
            "this profile does not hold. Record it anew with RingProfile."
        )
    return known.shape_bytes(gradient.shape, gradient.numel)


class _Wire:
    """A collective's stages, each of which takes one message at a time, first in, first out."""

    def __init__(self, collective: str, cluster: Cluster, nested: bool) -> None:
        self._stages = (
            _nested_stages(collective, cluster) if nested else [_flat_stage(collective, cluster)]
        )
        self._num_pieces: Callable[[float], int] = lambda num_bytes: 1
        if nested and collective == "all_reduce":
            self._num_pieces = lambda num_bytes: num_nested_pieces(
                num_bytes, cluster.local_size, cluster.num_nodes
            )
        self._free = [0.0] * len(self._stages)
        self._busy = [0.0] * len(self._stages)

    @property
    def free(self) -> float:
        """When the last stage has sent all messages."""
        return self._free[-1]

    @property
    def busy(self) -> float:
        """Seconds of work of the slowest stage."""
        return max(self._busy)

    def send(self, ready: float, num_bytes: float, *, inside: float | None = None) -> float:
        """When a message is over that could be sent at ``ready``.

        ``inside``: its bytes within a node, where they differ from those between nodes. It is in
        one piece then.
        """
        pieces = self._num_pieces(num_bytes) if inside is None else 1
        for _ in range(pieces):
            at = ready
            for index, seconds in enumerate(self._stages):
                took = seconds(num_bytes / pieces if inside is None or index == 1 else inside)
                at = self._free[index] = max(at, self._free[index]) + took
                self._busy[index] += took
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


def _delay_of_forward(
    profile: Profile, buckets: Sequence[PlannedBucket], wire: _Wire, between: float
) -> float:
    """How long forward waits for parameters, which set out when the optimizer has ended.

    Forward was not recorded parameter by parameter: it is taken for backward run the other way, so
    that the parameter whose gradient came last is needed first, and the times between them keep
    their proportion.
    """
    phases = profile.phases
    arrival: dict[str, float] = {}
    for bucket in reversed(buckets):
        arrived = wire.send(0.0, bucket.num_bytes)  # parameters travel at full precision
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
    sizes: Iterable[int] = (first << power for power in range(most.bit_length()))
    return [size for size in sizes if size <= most]
