"""Adasum: a sum of gradients that counts once what they have in common.

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b: their sum where they are
orthogonal, their mean where they are equal. Ranks are combined in pairs, then pairs of pairs, and
so on, each tensor by itself. Maleki et al., "Scaling distributed training with adaptive summation",
2020 (arXiv 2006.02924), section 4.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LEAST_NORM = math.sqrt(sys.float_info.min)  # of a vector that is not taken for zero, squared


def adasum_(flat: Tensor, numels: Sequence[int], comm: Communicator) -> None:
    """Combine 1-D ``flat`` over all ranks, a power of two of them, in place. Tensors of ``numels``
    follow each other.

    Vector halving, distance doubling: in each round a rank gives half of its segment to its
    partner, gets the partner's other half, and combines those, until it has one part of the result;
    then the ranks gather the parts. Dot products of a segment are sums over the ranks that have the
    other segments of the same vectors. They are float64.
    """
    distance = 1
    while distance < comm.world_size:
        start, stop = _segment(flat.numel(), comm.rank, 2 * distance)
        mine, theirs = flat[start:stop], _from_partner(flat, comm, distance)
        products = _products(mine, theirs, _cut(numels, start, stop))
        if comm.rank & distance:  # the vector of the lower ranks comes first
            products = products[[0, 2, 1]]
        first = comm.rank // (2 * distance) * (2 * distance)
        everyones = comm.all_gather(products, name="adasum of products")[
            first : first + 2 * distance
        ]
        dot, lower, upper = torch.stack(everyones).sum(0)
        factors = [_factors(dot, lower), _factors(dot, upper)]
        own, other = factors[::-1] if comm.rank & distance else factors
        _combine(mine, theirs, own, other, _cut(numels, start, stop))
        distance *= 2
    _gather(flat, comm)


def _segment(numel: int, rank: int, parts: int) -> tuple[int, int]:
    """What ``rank`` works on once vectors are cut into ``parts``: a half of the half of ... all."""
    start, stop, distance = 0, numel, 1
    while distance < parts:
        middle = (start + stop) // 2
        start, stop = (middle, stop) if rank & distance else (start, middle)
        distance *= 2
    return start, stop


def _from_partner(flat: Tensor, comm: Communicator, distance: int) -> Tensor:
    """The partner's vector, in the segment of this rank."""
    partner = comm.rank ^ distance
    start, stop = _segment(flat.numel(), comm.rank, 2 * distance)
    given_start, given_stop = _segment(flat.numel(), partner, 2 * distance)
    inputs, outputs = [[flat.new_empty(0)] * comm.world_size for _ in range(2)]
    inputs[partner] = flat[given_start:given_stop]
    outputs[partner] = theirs = flat.new_empty(stop - start)
    comm.all_to_all(inputs, outputs, name="adasum of halves").wait()
    return theirs


def _cut(numels: Sequence[int], start: int, stop: int) -> list[int]:
    """How many elements of each tensor lie between ``start`` and ``stop``."""
    counts, begin = [], 0
    for numel in numels:
        counts.append(max(0, min(begin + numel, stop) - max(begin, start)))
        begin += numel
    return counts


def _products(mine: Tensor, theirs: Tensor, counts: Sequence[int]) -> Tensor:
    """By tensor: the dot product, and both squared norms, of what lies in the segment."""
    rows = []
    for own, other in zip(mine.split(list(counts)), theirs.split(list(counts)), strict=True):
        a, b = own.double(), other.double()
        rows.append(torch.stack([a.dot(b), a.dot(a), b.dot(b)]))
    return torch.stack(rows, dim=1)


def _factors(dot: Tensor, squared_norm: Tensor) -> Tensor:
    return torch.where(squared_norm >= _LEAST_NORM, 1.0 - dot / squared_norm / 2, 1.0)


def _combine(
    mine: Tensor, theirs: Tensor, own: Tensor, other: Tensor, counts: Sequence[int]
) -> None:
    parts = zip(
        mine.split(list(counts)),
        theirs.split(list(counts)),
        own.tolist(),
        other.tolist(),
        strict=True,
    )
    for part, their_part, factor, their_factor in parts:
        wide = torch.promote_types(part.dtype, torch.float32)
        part.copy_(part.to(wide) * factor + their_part.to(wide) * their_factor)


def _gather(flat: Tensor, comm: Communicator) -> None:
    bounds = [_segment(flat.numel(), rank, comm.world_size) for rank in range(comm.world_size)]
    padded = flat.new_zeros(max(stop - start for start, stop in bounds))
    start, stop = bounds[comm.rank]
    padded[: stop - start] = flat[start:stop]
    for (start, stop), part in zip(
        bounds, comm.all_gather(padded, name="adasum of parts"), strict=True
    ):
        flat[start:stop] = part[: stop - start]
