"""Nearest neighbours by cosine similarity, in blocks, where queries and gallery lie on several
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

AllGather = Callable[[Tensor], Sequence[Tensor]]
"""Every rank's tensor, by rank, for a tensor of one shape and dtype on all ranks:
`Communicator.all_gather` is one."""


def search(
    queries: Tensor,
    gallery: Tensor,
    k: int,
    *,
    exclude: Tensor | None = None,
    chunk: int = 1024,
    block: int = 8192,
    all_gather: AllGather | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` items of all ranks' galleries that are most similar to each of this rank's
    ``queries``, best first.

    No rank holds the whole gallery: it passes by in blocks. Beside its own queries and gallery, a
    rank has memory for the ranks' blocks, for ``chunk`` x ``block`` similarities, and for the
    results.

    Args:
        queries: (q, d) of this rank, of unit length; q may differ between ranks.
        gallery: (n, d) of this rank, of unit length; n may differ too.
        k: Items to find; fewer are found where the galleries hold fewer.
        exclude: (q,) place of an item that a query does not find, such as itself; -1 for none.
        chunk: Queries compared at a time.
        block: Rows of a rank's gallery compared at a time.
        all_gather: With several ranks: brings tensors together.

    Returns:
        Similarities (q, k) and places (q, k). An item's place counts the galleries of all ranks,
        one rank after another. Where only excluded items are left, the similarity is -inf and the
        place -1.
    """
    sizes = row_counts(gallery, all_gather)
    k = min(k, sum(sizes))
    similarities = queries.new_full((len(queries), 0), -torch.inf)
    places = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, max(sizes), block):
        rows = gallery[start : start + block]
        parts: Sequence[Tensor] = [rows]
        if all_gather is not None:
            longest = min(block, max(sizes) - start)
            parts = all_gather(pad(rows, (0, 0, 0, longest - len(rows))).contiguous())
        offset = 0
        for size, part in zip(sizes, parts, strict=True):
            part = part[: max(0, size - start)]
            if len(part):
                found, at = _best_of(queries, part, k, offset + start, exclude, chunk)
                similarities, places = _merged((similarities, places), (found, at), k)
            offset += size
    return similarities, torch.where(similarities == -torch.inf, -1, places)


def nearest(queries: Tensor, gallery: Tensor, k: int, exclude: Tensor | None = None) -> Tensor:
    """(q, k) indices of the ``k`` items of ``gallery`` (n, d) most similar to each of ``queries``
    (q, d), best first.

    ``exclude`` (q,) names for each query an item of the gallery that does not count, itself for
    instance: where nothing else is left, the index is -1. Rows are taken as normalised.
    """
    return search(queries, gallery, k, exclude=exclude)[1]


def gather_rows(tensor: Tensor, all_gather: AllGather) -> Tensor:
    """The rows of all ranks' ``tensor``, one rank after another; ranks may have different
    numbers of rows.
    """
    sizes = row_counts(tensor, all_gather)
    padded = pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, max(sizes) - len(tensor)])
    return torch.cat([part[:size] for part, size in zip(all_gather(padded), sizes, strict=True)])


def row_counts(tensor: Tensor, all_gather: AllGather | None) -> list[int]:
    """How many rows each rank's ``tensor`` has."""
    if all_gather is None:
        return [len(tensor)]
    return [int(size) for size in all_gather(torch.tensor([len(tensor)], device=tensor.device))]


def _best_of(
    queries: Tensor, part: Tensor, k: int, first: int, exclude: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """The best of ``part``, whose first row has the place ``first``; excluded items have the
    similarity -inf.
    """
    found, at = [], []
    for begin in range(0, len(queries), chunk):
        rows = queries[begin : begin + chunk]
        left_out = None if exclude is None else exclude[begin : begin + chunk] - first
        one, where = _best(rows, part, k, left_out)
        found.append(one)
        at.append(where + first)
    if not found:
        shape = 0, min(k, len(part))
        return queries.new_empty(shape), torch.empty(shape, dtype=torch.long, device=queries.device)
    return torch.cat(found), torch.cat(at)


def _best(rows: Tensor, part: Tensor, k: int, left_out: Tensor | None) -> tuple[Tensor, Tensor]:
    similarity = rows @ part.T
    if left_out is not None:
        inside = ((left_out >= 0) & (left_out < len(part))).nonzero().squeeze(1)
        similarity[inside, left_out[inside]] = -torch.inf
    best = similarity.topk(min(k, len(part)), dim=1)
    return best.values, best.indices


def _merged(
    one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], k: int
) -> tuple[Tensor, Tensor]:
    similarity, places = torch.cat([one[0], other[0]], dim=1), torch.cat([one[1], other[1]], dim=1)
    best = similarity.topk(min(k, similarity.shape[1]), dim=1)
    return best.values, places.gather(1, best.indices)
