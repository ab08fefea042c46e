"""What a collective costs: the α–β model of a ring, and its fit to measured times.

An all-reduce of S bytes over N ranks takes 2·(N−1)·(α + S/(N·B)): that many messages in a row, each
with a latency of α seconds and 1/N of the bytes at B bytes per second. Its halves, reduce-scatter
and all-gather, take half of that. Source: Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005, section 3.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Literal

from lightning_ring.errors import ConfigurationError

Collective = Literal["all_reduce", "reduce_scatter", "all_gather"]

DEFAULT_CAP_MB = 25.0
# as `lightning-ring plan` has it for a ResNet-18 at 1 to 25 Gbit/s
MOST_RANKS_FOR_SMALL_BUCKETS = 16
FIRST_BUCKET_MB = 1.0
NEARLY_EMPTY = 1 / 16  # of a bucket's cap
TINY = 1 / 64  # of the large gradient that comes next
LEAST_PIECE_BYTES = 4 * 2**20
TCP_ALPHA_SECONDS = 200e-6  # a message between two hosts, with what the sender's interpreter adds
_NODE_BANDWIDTH = 7e9  # bytes per second of two ranks that share memory, buckets larger than caches
PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}  # around the ring


def default_cap_mb(device_type: str, world_size: int) -> float:
    """Size in MiB of a bucket of gradients where nobody chose one.

    Backward cannot hide the last bucket, so that small ones are better between few CPUs. Past
    `MOST_RANKS_FOR_SMALL_BUCKETS` more messages cost more than they hide.
    """
    return (
        4.0
        if device_type == "cpu" and world_size <= MOST_RANKS_FOR_SMALL_BUCKETS
        else DEFAULT_CAP_MB
    )


def number_by_size(sizes: Sequence[float], cap: float, first_cap: float) -> list[int]:
    """The bucket of each gradient, of ``sizes`` bytes, under ``cap`` bytes a bucket.

    The first bucket holds up to ``first_cap``, so that it leaves early; any may hold one larger
    gradient alone. A nearly empty bucket takes the next gradient whatever its size: alone it would
    cost a message for few bytes. When a large gradient begins a bucket, the tiny ones just before
    it, such as its layer's bias, move there too: a layer's gradients come together, and the earlier
    bucket would have to wait for them.
    """
    numbers: list[int] = []
    number, total = 0, 0.0
    for size in sizes:
        limit = cap if number else min(cap, first_cap)
        takes = total + size <= limit or (number > 0 and total < NEARLY_EMPTY * cap)
        if total and not takes:
            begin = len(numbers)
            while begin and numbers[begin - 1] == number and sizes[begin - 1] < TINY * size:
                begin -= 1
            if not begin or numbers[begin - 1] != number:  # nothing would stay
                begin = len(numbers)
            number += 1
            numbers[begin:] = [number] * (len(numbers) - begin)
            total = sum(sizes[begin : len(numbers)])
        numbers.append(number)
        total += size
    return numbers


def num_nested_pieces(num_bytes: float, local_size: int, num_nodes: int) -> int:
    """In how many pieces a tensor passes through a ring in each node and rings across nodes.

    With c seconds of work in the node and a latency of A across nodes, k pieces take c/k + k·A
    longer than their bytes on the wire, which is least for k = √(c/A). Typical links are assumed:
    all ranks must find one number before anything is measured.
    """
    in_node = 2 * (local_size - 1) / local_size * num_bytes / _NODE_BANDWIDTH
    latency = 2 * (num_nodes - 1) * TCP_ALPHA_SECONDS
    most = -(-int(num_bytes) // LEAST_PIECE_BYTES)
    return max(1, min(most, round(math.sqrt(in_node / latency))))


@dataclass(frozen=True, slots=True)
class CostModel:
    """A link as the ring sees it."""

    alpha_seconds: float  # latency of one message, software included
    # bytes per second that one rank sends; inf where time was seen not to depend on size
    bandwidth: float

    def seconds(self, num_bytes: float, world_size: int, collective: str = "all_reduce") -> float:
        """Time of ``collective`` on a tensor of ``num_bytes``; 0 for one rank."""
        steps = PASSES[collective] * (world_size - 1)
        return steps * (self.alpha_seconds + num_bytes / (world_size * self.bandwidth))


def fit(
    sizes_bytes: Sequence[float],
    seconds: Sequence[float],
    world_size: int,
    *,
    collective: Collective = "all_reduce",
) -> CostModel:
    """The model of measured times: the line of Theil (1950) and Sen (1968) through the median time
    of each size, under α ≥ 0 and 1/B ≥ 0.

    Its slope is the median over all pairs of sizes, so that a few late messages do not count.
    ``collective`` took ``seconds`` on tensors of ``sizes_bytes`` over 2 or more ranks.

    Raises:
        ConfigurationError: Fewer than two different sizes, one rank, or a time or size that cannot
            be.
    """
    points = _medians(sizes_bytes, seconds)
    if world_size < 2 or len(points) < 2:
        raise ConfigurationError(
            f"cannot fit α and β to {len(points)} different size(s) on {world_size} rank(s); "
            "measure at least two sizes on at least two ranks."
        )
    slopes = ((t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in combinations(points, 2))
    slope = max(median(slopes), 0.0)
    intercept = max(median(time - slope * size for size, time in points), 0.0)
    steps = PASSES[collective] * (world_size - 1)
    return CostModel(intercept / steps, steps / (world_size * slope) if slope > 0 else math.inf)


def _medians(sizes_bytes: Sequence[float], seconds: Sequence[float]) -> list[tuple[float, float]]:
    times: dict[float, list[float]] = defaultdict(list)
    for size, time in zip(sizes_bytes, seconds, strict=True):
        if not (math.isfinite(time) and time > 0 and math.isfinite(size) and size >= 0):
            raise ConfigurationError(
                f"{size} bytes in {time} s is no measurement; sizes must be at least 0 and times "
                "greater than 0."
            )
        times[float(size)].append(time)
    return [(size, median(values)) for size, values in sorted(times.items())]
