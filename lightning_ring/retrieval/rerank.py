"""Re-ranking by k-reciprocal neighbours: Zhong, Zheng, Cao, Li, CVPR 2017, arXiv:1701.08398."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.retrieval.neighbours import search


def rerank(
    queries: Tensor,
    gallery: Tensor,
    k: int,
    *,
    k1: int = 20,
    k2: int = 6,
    weight: float = 0.3,
    candidates: int = 100,
    exclude: Tensor | None = None,
    chunk: int = 256,
) -> Tensor:
    """(q, k) indices of ``gallery``, best first, by distance and by the neighbours that two items share; -1 for none.

    Two items are alike if each is among the other's nearest, and if their neighbours are the same: the Jaccard distance
    of their sets of k-reciprocal neighbours (equations 2 to 11). Neighbours are looked for among queries and gallery
    together, in one process, whose memory holds some (q + n) x k1 x k2 numbers and ``chunk`` x (q + n).

    Args:
        queries: (q, d) of unit length.
        gallery: (n, d) of unit length.
        k: Items to find.
        k1: Neighbours that are compared; some more than a class has items.
        k2: Nearest items over which sets are averaged ("local query expansion").
        weight: Of the plain distance; 1 keeps the order of `search` (λ, equation 12).
        candidates: Nearest items of a query that are put into another order; the rest is left out.
        exclude: (q,) item that a query does not find, such as itself: it then counts once, as the item; -1 for none.
        chunk: Queries compared at a time.

    Raises:
        ValueError: ``k1``, ``k2``, ``weight`` or ``candidates`` are out of their range.
    """
    if min(k, k1, k2) < 1 or k2 > k1 or not 0 <= weight <= 1 or candidates < k:
        raise ValueError(
            f"rerank expects 1 <= k2 <= k1, a weight from 0 to 1 and at least k candidates, got k={k}, k1={k1}, "
            f"k2={k2}, weight={weight}, candidates={candidates}."
        )
    outside = torch.ones(len(queries), dtype=torch.bool) if exclude is None else exclude.cpu() < 0
    items = torch.cat([gallery, queries[outside.to(queries.device)]])  # a query inside the gallery is there already
    own = torch.arange(len(gallery), len(items)).new_zeros(len(queries))
    own[outside] = torch.arange(len(gallery), len(items))
    if exclude is not None:
        own[~outside] = exclude.cpu()[~outside]
    places, shares = _expanded(*_encoded(items, k1), items, k2)
    similarity, found = search(queries, gallery, candidates, exclude=exclude)
    orders = []
    for begin in range(0, len(queries), chunk):
        part = slice(begin, begin + chunk)
        jaccard = _jaccard(places, shares, own[part], found[part], len(items))
        distance = (1 - weight) * jaccard + weight * (2 - 2 * similarity[part])
        distance[similarity[part] == -torch.inf] = torch.inf
        orders.append(found[part].gather(1, distance.argsort(dim=1, stable=True)[:, :k]))
    return torch.cat(orders) if orders else found[:, :k]


def _encoded(items: Tensor, k1: int) -> tuple[Tensor, Tensor]:
    """Each item's expanded k-reciprocal neighbours (equations 3 to 5), as places and shares that sum to 1 (eq. 7).

    Rows are padded with places of share 0.
    """
    nearest = search(items, items, k1 + 1)[1]  # the item itself among them, but for copies
    half = _reciprocal(nearest[:, : max(1, round(k1 / 2)) + 1])
    own = _reciprocal(nearest)
    size = len(items)
    rows: list[Tensor] = []
    for item in range(size):
        mine = nearest[item][own[item]]
        inside = torch.zeros(size, dtype=torch.bool, device=items.device)
        inside[mine] = True
        inside[item] = True  # among many copies of it, it need not be one of its own nearest
        candidates = nearest[mine][:, : half.shape[1]]
        theirs = half[mine]  # of each neighbour, those reciprocal in half as many
        shared = (inside[candidates] & theirs).sum(1)
        add = shared * 3 > theirs.sum(1) * 2
        inside[candidates[add][theirs[add]]] = True
        rows.append(inside.nonzero().squeeze(1))
    places = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
    filled = places >= 0
    places = places.clamp(min=0)
    near = torch.stack([items[row] @ items[places[row]].T for row in range(size)])
    shares = torch.where(filled, (2 * near - 2).exp(), 0)  # exp(-distance), squared Euclidean
    return places, shares / shares.sum(1, keepdim=True)


def _reciprocal(nearest: Tensor) -> Tensor:
    """Whether an item is among the nearest of each of its nearest, of the same shape; itself is."""
    items = torch.arange(len(nearest), device=nearest.device)
    return (nearest[nearest] == items[:, None, None]).any(2)


def _expanded(places: Tensor, shares: Tensor, items: Tensor, k2: int) -> tuple[Tensor, Tensor]:
    """The mean over each item's ``k2`` nearest (equation 11). A place may stand in a row several times."""
    if k2 == 1:
        return places, shares
    nearest = search(items, items, k2)[1]
    return places[nearest].flatten(1), (shares[nearest] / k2).flatten(1)


def _jaccard(places: Tensor, shares: Tensor, queries: Tensor, found: Tensor, size: int) -> Tensor:
    """Distance of each of ``queries`` (places in items) to each of its ``found`` (equation 10)."""
    dense = shares.new_zeros(len(queries), size)
    dense.scatter_add_(1, places[queries], shares[queries])
    distance = torch.empty(found.shape, dtype=shares.dtype, device=shares.device)
    other = shares.new_zeros(found.shape[1], size)
    for row, candidates in enumerate(found):
        other.zero_().scatter_add_(1, places[candidates], shares[candidates])
        least = torch.minimum(other, dense[row]).sum(1)
        distance[row] = 1 - least / (2 - least)  # shares sum to 1, so that the greater ones sum to 2 - least
    return distance
