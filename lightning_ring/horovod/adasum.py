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

    In each round a rank and its partner exchange what they have, and both combine it in the same
    way, in float64.
    """
    distance = 1
    while distance < comm.world_size:
        partner = comm.rank ^ distance
        pair = [flat, _from(partner, flat, comm)]
        if partner < comm.rank:
            pair.reverse()
        parts = zip(*(vector.split(list(numels)) for vector in pair), strict=True)
        flat.copy_(torch.cat([_combined(lower, upper) for lower, upper in parts]))
        distance *= 2


def _from(partner: int, flat: Tensor, comm: Communicator) -> Tensor:
    nothing = flat.new_empty(0)
    inputs, outputs = [nothing] * comm.world_size, [nothing] * comm.world_size
    inputs[partner], outputs[partner] = flat, torch.empty_like(flat)
    comm.all_to_all(inputs, outputs, name="adasum").wait()
    return outputs[partner]


def _combined(lower: Tensor, upper: Tensor) -> Tensor:
    a, b = lower.double(), upper.double()
    dot = a.dot(b)
    return a * _factor(dot, a.dot(a)) + b * _factor(dot, b.dot(b))


def _factor(dot: Tensor, squared_norm: Tensor) -> Tensor:
    return torch.where(squared_norm >= _LEAST_NORM, 1.0 - dot / squared_norm / 2, 1.0)
