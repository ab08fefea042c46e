"""Gradients as matrices, as they lie in a bucket, and the thin factors that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Matrix:
    """One gradient, n × m, with the factors P (n × r) and Q (m × r) that travel for it.

    ``q`` is the same on every rank and starts the next power iteration.
    """

    name: str
    gradient: Tensor
    p: Tensor
    q: Tensor
    drawn: Tensor | None = None  # the random Q it starts from, on a device that would need it back


@dataclass(slots=True)
class Plan:
    """The two messages of a flat tensor of gradients: ``matrices`` travel as factors, the ``rest``
    as it is.

    ``first`` holds all P and then the rest, ``second`` all Q.
    """

    names: list[str]
    matrices: list[Matrix]
    rest: list[Tensor]
    sent: list[Tensor]  # the rest's places in the first message
    first: Tensor
    second: Tensor


def orthonormal(factor: Tensor) -> Tensor:
    """Columns that span the same space; where that has fewer dimensions, such as for zeros, some
    of the rest too.
    """
    return torch.linalg.qr(factor).Q


def in_memory_order(flat: Tensor, view: Tensor) -> Tensor:
    """The elements of the dense ``view`` of ``flat`` as one vector."""
    start = view.storage_offset() - flat.storage_offset()
    return flat[start : start + view.numel()]


def as_matrix(flat: Tensor, view: Tensor) -> Tensor:
    """``view`` as a matrix without moving anything: a row for each index of the dimension that
    varies slowest.

    For a weight, contiguous or channels-last, those are its outputs.
    """
    strides = [
        (stride, size) for stride, size in zip(view.stride(), view.size(), strict=True) if size > 1
    ]
    rows = max(strides)[1] if strides and view.numel() else 1
    return in_memory_order(flat, view).view(rows, view.numel() // rows)


def counterpart(other: Tensor, flat: Tensor, part: Tensor) -> Tensor:
    """The elements of ``other`` at the place of ``part`` in ``flat``, with the shape of
    ``part``.
    """
    start = part.storage_offset() - flat.storage_offset()
    return other[start : start + part.numel()].view_as(part)


def side_by_side(parts: Sequence[Tensor], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Copies of ``parts`` in one new vector, and views of the copies."""
    flat = like.new_zeros(sum(part.numel() for part in parts))
    views, start = [], 0
    for part in parts:
        views.append(flat[start : start + part.numel()].view_as(part).copy_(part))
        start += part.numel()
    return flat, views
