"""Gradients merged into buckets: few messages because of latency, many because the wire is idle
until one leaves.

The model is that of MG-WFBP (Shi, Chu and Li, "MG-WFBP: efficient data communication for
distributed synchronous SGD algorithms", 2019, arXiv:1811.11141): a bucket leaves when its last
gradient is there and the bucket before it has arrived. MG-WFBP merges a gradient into the next one
when the wire is busy anyway or waiting costs less than a message's start-up. Here the same trade is
settled by dynamic programming, which finds the earliest end there is in that model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

Seconds = Callable[[float], float]
"""Duration of one message, by its bytes; it never falls with size."""


def merge(sizes: Sequence[float], ready: Sequence[float], seconds: Seconds) -> list[int]:
    """Cut gradients into consecutive buckets such that the last one arrives as early as possible,
    in large buckets.

    An arrival depends on the buckets before it through the last one's arrival only, and never falls
    when that rises: so the earliest arrival of each prefix is all that has to be known. Then, from
    the last bucket to the first, each takes as many gradients as it can without moving the end.
    O(number of gradients squared).

    ``sizes`` are bytes in the order of travel, ``ready`` the seconds after which each gradient is
    there; a bucket waits for the latest of its own. Returns for each bucket one past the index of
    its last gradient.
    """
    before = [0.0, *accumulate(sizes)]
    earliest = [0.0]  # by length of the prefix
    for stop in range(1, len(sizes) + 1):
        arrivals, latest = [], 0.0
        for start in range(stop - 1, -1, -1):
            latest = max(latest, ready[start])
            arrivals.append(max(earliest[start], latest) + seconds(before[stop] - before[start]))
        earliest.append(min(arrivals))
    ends: list[int] = []
    stop, deadline = len(sizes), earliest[-1] * (1 + 1e-9)
    while stop > 0:
        ends.append(stop)
        first, latest = stop - 1, 0.0
        for start in range(stop - 1, -1, -1):
            latest = max(latest, ready[start])
            if max(earliest[start], latest) + seconds(before[stop] - before[start]) <= deadline:
                first = start
        deadline -= seconds(before[stop] - before[first])
        stop = first
    return ends[::-1]


def last_arrival(
    ends: Sequence[int], sizes: Sequence[float], ready: Sequence[float], seconds: Seconds
) -> float:
    """When the last of the buckets that end at ``ends`` (as `merge` returns them) has arrived."""
    arrived, start = 0.0, 0
    for stop in ends:
        arrived = max(arrived, *ready[start:stop]) + seconds(sum(sizes[start:stop]))
        start = stop
    return arrived
