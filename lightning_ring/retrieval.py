"""Retrieval by embeddings: nearest neighbours over the ranks, hit rates R@K and MAP@R."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

__all__ = [
    "AllGather",
    "NothingToFindError",
    "RetrievalMetrics",
    "gather_rows",
    "retrieval_metrics",
    "search",
]

AllGather = Callable[[Tensor], Sequence[Tensor]]
"""Returns every rank's tensor, by rank; shape and dtype are equal on all ranks.
`Communicator.all_gather` is one.
"""


CHUNK = 1024  # queries that are compared at a time
BLOCK = 8192  # rows of a rank's gallery that are compared at a time


def search(
    queries: Tensor,
    gallery: Tensor,
    k: int,
    *,
    exclude: Tensor | None = None,
    all_gather: AllGather | None = None,
) -> tuple[Tensor, Tensor]:
    """The ``k`` items of all galleries most similar to each of this rank's ``queries``, best first.

    No rank holds the whole gallery: it passes by in blocks.

    Args:
        queries: (q, d) of this rank, of unit length; q may differ between ranks.
        gallery: (n, d) of this rank, of unit length; n may differ too.
        k: Items to find; fewer are found where the galleries hold fewer.
        exclude: (q,) place of an item that a query must not find, such as itself; -1 for none.
        all_gather: Required with several ranks.

    Returns:
        Similarities (q, k) and places (q, k). Places count through the galleries in rank order.
        Where only excluded items are left, the similarity is -inf and the place -1.
    """
    all_gather = all_gather or _alone
    sizes = row_counts(gallery, all_gather)
    k = min(k, sum(sizes))
    similarities = queries.new_empty(len(queries), 0)
    places = queries.new_empty(len(queries), 0, dtype=torch.long)
    for start in range(0, max(sizes), BLOCK):
        rows = gallery[start : start + BLOCK]
        longest = min(BLOCK, max(sizes) - start)
        parts = all_gather(pad(rows, (0, 0, 0, longest - len(rows))).contiguous())
        offset = 0
        for size, part in zip(sizes, parts, strict=True):
            part = part[: max(0, size - start)]
            if len(part):
                found, at = _best_of(queries, part, k, offset + start, exclude)
                similarities = torch.cat([similarities, found], dim=1)
                places = torch.cat([places, at], dim=1)
                best = similarities.topk(min(k, similarities.shape[1]), dim=1)
                similarities, places = best.values, places.gather(1, best.indices)
            offset += size
    return similarities, torch.where(similarities == -torch.inf, -1, places)


def gather_rows(tensor: Tensor, all_gather: AllGather) -> Tensor:
    """The rows of all ranks' ``tensor``, in rank order; ranks may differ in rows."""
    sizes = row_counts(tensor, all_gather)
    padded = pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, max(sizes) - len(tensor)])
    return torch.cat([part[:size] for part, size in zip(all_gather(padded), sizes, strict=True)])


def row_counts(tensor: Tensor, all_gather: AllGather) -> list[int]:
    return [int(size) for size in all_gather(torch.tensor([len(tensor)], device=tensor.device))]


def _alone(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor]


def _best_of(
    queries: Tensor, part: Tensor, k: int, first: int, exclude: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The best of ``part``, whose first row has the place ``first``; excluded items score -inf."""
    found, at = [], []
    left_out = None if exclude is None else (exclude - first).split(CHUNK)
    for number, rows in enumerate(queries.split(CHUNK)):
        similarity = rows @ part.T
        if left_out is not None:
            columns = left_out[number]
            inside = ((columns >= 0) & (columns < len(part))).nonzero().squeeze(1)
            similarity[inside, columns[inside]] = -torch.inf
        best = similarity.topk(min(k, len(part)), dim=1)
        found.append(best.values)
        at.append(best.indices + first)
    return torch.cat(found), torch.cat(at)


# -- metrics

Items = tuple[Tensor, Tensor, Tensor]
"""Embeddings (n, d), integer classes (n,), and indices (n,), which tell repeats from items."""


class NothingToFindError(ValueError):
    """No two items share a class: the same on every rank."""


@dataclass(frozen=True, slots=True)
class RetrievalMetrics:
    """The results of `retrieval_metrics`; rates are means over ``num_queries``.

    Attributes:
        hit_rate: R@K for each K asked for: the share of queries with an item of their class among
            the K nearest.
        map_at_r: Mean over queries of the average precision among the R nearest, R being the number
            of other items of the query's class (Musgrave, Belongie, Lim, "A metric learning reality
            check", ECCV 2020, section 3.2).
        num_queries: Items that have another one of their class.
        num_without_match: Items that have none; they stay in the gallery.
        num_duplicates: Items dropped as repeats of an index.
    """

    hit_rate: dict[int, float]
    map_at_r: float
    num_queries: int
    num_without_match: int
    num_duplicates: int

    def as_dict(self) -> dict[str, float]:
        """For logging: ``{"R@1": ..., "R@10": ..., "MAP@R": ...}``."""
        return {f"R@{k}": rate for k, rate in self.hit_rate.items()} | {"MAP@R": self.map_at_r}


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    indices: Tensor,
    *,
    gallery: Items | None = None,
    ks: Sequence[int] = (1, 10, 100),
    rank: int = 0,
    all_gather: AllGather | None = None,
) -> RetrievalMetrics:
    """Look up each item of all ranks among all others, by cosine similarity. Every rank gets the
    same.

    An item never finds itself. Every rank holds all labels and indices, but no rank all embeddings.

    Args:
        embeddings: (n, d) of this rank; n may differ between ranks. Any floating dtype; compared in
            float32 (float64 if they are).
        labels: (n,) integer classes.
        indices: (n,) position of each item in the data set, to recognise repeats.
        gallery: This rank's items to search instead. An item that is also a query has the same
            index in both; no other query may have it.
        ks: The K of R@K.
        rank: Of this process.
        all_gather: Required with several ranks.

    Raises:
        ValueError: Shapes do not fit, values are not finite, or an item has another class in
            ``gallery``.
        NothingToFindError: No item has a match.
    """
    items = (embeddings, labels, indices)
    _check(items, gallery, ks)
    if all_gather is None:
        rank, all_gather = 0, _alone
    queries = _Spread(items, rank, all_gather)
    among = queries if gallery is None else _Spread(gallery, rank, all_gather)
    place = queries.places_in(among)
    _check_classes(queries, among, place)
    num_others = among.num_of(queries.labels) - (place >= 0).long()
    asking = num_others > 0
    num_queries = int(asking.sum())
    if not num_queries:
        raise NothingToFindError(
            f"retrieval_metrics: of {len(queries.labels)} items no two share a class, so nothing "
            "can be found."
            if gallery is None
            else f"retrieval_metrics: none of {len(queries.labels)} queries has an item of its "
            "class in the gallery."
        )
    own, asks = queries.mine, asking[queries.mine]
    similarity, found = search(
        queries.unit[asks],
        among.unit,
        max(*ks, int(num_others.max())),
        exclude=place[own][asks],
        all_gather=all_gather,
    )
    wanted = queries.labels[own][asks]
    right = (among.labels[found] == wanted[:, None]) & (similarity > -torch.inf)
    sums = _sums(right, num_others[own][asks], ks)
    sums = torch.stack(list(all_gather(sums))).sum(0)
    *hits, precision = (sums / num_queries).tolist()
    return RetrievalMetrics(
        hit_rate=dict(zip(ks, hits, strict=True)),
        map_at_r=precision,
        num_queries=num_queries,
        num_without_match=len(queries.labels) - num_queries,
        num_duplicates=queries.num_duplicates,
    )


class _Spread:
    """Items without repeats: this rank's embeddings, all ranks' labels and indices in rank order.

    Attributes:
        unit: (n, d) of unit length.
        labels, indices: (n of all ranks,).
        mine: The places of this rank's.
    """

    def __init__(self, items: Items, rank: int, all_gather: AllGather) -> None:
        embeddings, labels, indices = items
        start = sum(row_counts(labels, all_gather)[:rank])
        labels = gather_rows(labels.long(), all_gather)
        indices = gather_rows(indices.long(), all_gather)
        if not all(all_gather(torch.isfinite(embeddings).all().reshape(1).long())):
            raise ValueError(
                "retrieval_metrics: some embeddings are NaN or infinite; the model has diverged."
            )
        fresh = _first_of_each(indices)
        mine = fresh[start : start + len(embeddings)]
        self.unit = normalize(
            embeddings[mine].to(torch.promote_types(embeddings.dtype, torch.float32)), dim=1
        )
        self.labels, self.indices = labels[fresh], indices[fresh]
        first = int(fresh[:start].sum())
        self.mine = slice(first, first + len(self.unit))
        self.num_duplicates = len(labels) - len(self.labels)

    def places_in(self, other: _Spread) -> Tensor:
        """Where each of these items (of all ranks) stands in ``other``; -1 for nowhere."""
        mine, others = _numbered(self.indices, other.indices)
        places = mine.new_full((len(mine) + len(others),), -1)
        places[others] = torch.arange(len(others), device=mine.device)
        return places[mine]

    def num_of(self, labels: Tensor) -> Tensor:
        mine, asked = _numbered(self.labels, labels)
        return torch.bincount(mine, minlength=len(mine) + len(asked))[asked]


def _numbered(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers for the values of both: equal ones have the same number, less than their count."""
    _, numbers = torch.cat([one, other]).unique(return_inverse=True)
    return numbers[: len(one)], numbers[len(one) :]


def _check_classes(queries: _Spread, among: _Spread, place: Tensor) -> None:
    """Raises `ValueError` on every rank if a query is in the gallery under another class."""
    both = place >= 0
    differ = among.labels[place[both]] != queries.labels[both]
    if bool(differ.any()):
        index = int(queries.indices[both][differ][0])
        raise ValueError(
            f"retrieval_metrics: {int(differ.sum())} items are in the gallery under another class "
            f"than among the queries, such as the index {index}. Give an index to one item, and "
            "one class to an item."
        )


def _sums(right: Tensor, num_others: Tensor, ks: Sequence[int]) -> Tensor:
    """Summed over queries: a hit for each of ``ks``, and the average precision at R.

    Args:
        right: (queries, found) whether a result is of the query's class, best first.
        num_others: (queries,) R.
    """
    hits = [right[:, :k].any(1).sum() for k in ks]
    position = torch.arange(1, right.shape[1] + 1, device=right.device)
    counts = right & (position <= num_others[:, None])
    average = (counts.cumsum(1).double() / position * counts).sum(1) / num_others
    return torch.stack([*(hit.double() for hit in hits), average.sum()])


def _first_of_each(indices: Tensor) -> Tensor:
    """(n,) whether an index occurs for the first time."""
    order = indices.argsort(stable=True)
    ascending = indices[order]
    fresh = torch.ones_like(indices, dtype=torch.bool)
    fresh[order[1:]] = ascending[1:] != ascending[:-1]
    return fresh


def _check(items: Items, gallery: Items | None, ks: Sequence[int]) -> None:
    for embeddings, labels, indices in (items, gallery or items):
        if (
            embeddings.ndim != 2
            or labels.shape != embeddings.shape[:1]
            or indices.shape != labels.shape
        ):
            raise ValueError(
                "retrieval_metrics expects embeddings (n, d), labels (n,) and indices (n,), got "
                f"{tuple(embeddings.shape)}, {tuple(labels.shape)} and {tuple(indices.shape)}."
            )
    if gallery is not None and (
        gallery[0].shape[1] != items[0].shape[1] or gallery[0].dtype != items[0].dtype
    ):
        raise ValueError(
            f"retrieval_metrics: queries have embeddings of {items[0].shape[1]} x "
            f"{items[0].dtype}, the gallery of {gallery[0].shape[1]} x {gallery[0].dtype}. Embed "
            "both with one model."
        )
    if not ks or min(ks) < 1:
        raise ValueError(f"retrieval_metrics expects every k to be at least 1, got ks={ks}.")
