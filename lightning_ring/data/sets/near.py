"""Pairs of 64-bit hashes that differ in few bits, without comparing all with all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

BITS = 64
MAX_DISTANCE = 15
_AT_ONCE = 1 << 22  # pairs compared at a time: 32 MiB of differences


def near_pairs(
    hashes: npt.NDArray[np.uint64], distance: int
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Pieces of ``(i, j, bits)`` with i < j: every pair that differs in at most ``distance`` bits, at least once.

    The bits are cut into ``distance + 1`` bands. Two hashes within the distance agree in one band at least: only hashes
    that share a band are compared (Manku et al., Detecting near-duplicates for web crawling, 2007).
    """
    edges = np.linspace(0, BITS, distance + 2).astype(int).tolist()
    for low, high in pairwise(edges):
        band = (hashes >> np.uint64(low)) & np.uint64(2 ** (high - low) - 1)
        order = np.argsort(band, kind="stable")
        starts = np.flatnonzero(np.concatenate([[True], np.diff(band[order]) != 0]))
        ends = np.append(starts[1:], len(order))
        shared = ends - starts > 1
        for start, end in zip(starts[shared].tolist(), ends[shared].tolist(), strict=True):
            members = np.sort(order[start:end])
            step = max(1, _AT_ONCE // len(members))
            for first in range(0, len(members), step):
                rows = members[first : first + step]
                bits = _bit_count(hashes[rows][:, None] ^ hashes[members][None, :])
                a, b = np.nonzero((bits <= distance) & (rows[:, None] < members[None, :]))
                if len(a):
                    yield rows[a], members[b], bits[a, b].astype(np.int64)


def _bit_count(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    if hasattr(np, "bitwise_count"):  # numpy 2
        return np.bitwise_count(values)
    table = np.array([bin(byte).count("1") for byte in range(256)], np.uint8)
    counts: npt.NDArray[np.uint8] = table[values[..., None].view(np.uint8)].sum(-1, dtype=np.uint8)
    return counts
