"""How well embeddings retrieve: hit rates R@K and MAP@R, over the embeddings of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from lightning_ring.retrieval.neighbours import AllGather, gather_rows, row_counts, search

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
        num_without_match: Items that have none; they stay in the gallery but ask nothing.
        num_duplicates: Items dropped because another with the same index was there (samplers pad
            with repeats).
    """

    hit_rate: dict[int, float]
    map_at_r: float
    num_queries: int
    num_without_match: int
    num_duplicates: int

    def as_dict(self) -> dict[str, float]:
        """For logging: ``{"R@1": ..., "R@10": ..., "MAP@R": ...}``."""
        return {**{f"R@{k}": rate for k, rate in self.hit_rate.items()}, "MAP@R": self.map_at_r}


def retrieval_metrics(
    embeddings: Tensor,
    labels: Tensor,
    indices: Tensor,
    *,
    gallery: Items | None = None,
    ks: Sequence[int] = (1, 10, 100),
    chunk: int = 1024,
    block: int = 8192,
    rank: int = 0,
    world_size: int = 1,
    all_gather: AllGather | None = None,
) -> RetrievalMetrics:
    """Each item of all ranks is looked up among all the others, by cosine similarity. The same on
    every rank.

    An item never finds itself. Each rank looks up its own items, while the others' embeddings pass
    by in blocks: every rank holds all labels and indices, but no rank all embeddings (`search`).

    Args:
        embeddings: (n, d) of this rank; n may differ between ranks. Any floating dtype; compared in
            float32 (float64 if they are).
        labels: (n,) integer classes.
        indices: (n,) position of each item in the data set, by which repeats are told from items.
        gallery: Items among which to look instead, of this rank. An item that is a query too has
            one index in both; no other query may have its index.
        ks: The K of R@K.
        chunk, block: Queries, and rows of a rank's gallery, compared at a time.
        rank, world_size: Of this process.
        all_gather: With more than one rank: brings tensors together.

    Raises:
        ValueError: Shapes do not fit, values are not finite, an item has another class in
            ``gallery``, or ``all_gather`` is missing.
        NothingToFindError: There is no item with a match (a `ValueError` too).
    """
    items = (embeddings, labels, indices)
    _check(items, gallery, ks, min(chunk, block), world_size, all_gather)
    gather = all_gather if world_size > 1 else None
    queries = _Spread(items, rank, gather)
    among = queries if gallery is None else _Spread(gallery, rank, gather)
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
    mine = torch.zeros_like(asking)
    mine[queries.mine] = asking[queries.mine]
    similarity, found = search(
        queries.unit[asking[queries.mine]],
        among.unit,
        max(*ks, int(num_others.max())),
        exclude=place[mine],
        chunk=chunk,
        block=block,
        all_gather=gather,
    )
    right = (among.labels[found] == queries.labels[mine][:, None]) & (similarity > -torch.inf)
    sums = _sums(right, num_others[mine], ks)
    if gather is not None:
        sums = torch.stack(list(gather(sums))).sum(0)
    *hits, precision = (sums / num_queries).tolist()
    return RetrievalMetrics(
        hit_rate=dict(zip(ks, hits, strict=True)),
        map_at_r=precision,
        num_queries=num_queries,
        num_without_match=len(queries.labels) - num_queries,
        num_duplicates=queries.num_duplicates,
    )


class _Spread:
    """Items over the ranks, each once: embeddings of this rank's, labels and indices of all, one
    rank after another.

    Attributes:
        unit: (n, d) of unit length.
        labels, indices: (n of all ranks,).
        mine: The places of this rank's.
    """

    def __init__(self, items: Items, rank: int, all_gather: AllGather | None) -> None:
        embeddings, labels, indices = items
        start, finite = 0, torch.isfinite(embeddings).all().reshape(1).long()
        if all_gather is not None:
            start = sum(row_counts(labels, all_gather)[:rank])
            finite = torch.cat(list(all_gather(finite)))
            labels = gather_rows(labels.long(), all_gather)
            indices = gather_rows(indices.long(), all_gather)
        if not bool(finite.all()):
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
        if not len(other.indices):
            return torch.full_like(self.indices, -1)
        ascending, order = other.indices.sort()
        at = torch.searchsorted(ascending, self.indices).clamp(max=len(ascending) - 1)
        return torch.where(ascending[at] == self.indices, order[at], -1)

    def num_of(self, labels: Tensor) -> Tensor:
        """How many of these items are of each class of ``labels``."""
        if not len(self.labels):
            return torch.zeros_like(labels)
        classes, counts = self.labels.unique(return_counts=True)
        at = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
        return torch.where(classes[at] == labels, counts[at], 0)


def _check_classes(queries: _Spread, among: _Spread, place: Tensor) -> None:
    """Raises `ValueError` on every rank: a query is in the gallery under another class, so that
    R would be wrong.
    """
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
        right: (queries, found) whether what was found is of the query's class, best first.
        num_others: (queries,) R.
    """
    hits = [right[:, :k].any(1).sum() for k in ks]
    position = torch.arange(1, right.shape[1] + 1, device=right.device)
    counts = right & (position <= num_others[:, None])
    average = (counts.cumsum(1).double() / position * counts).sum(1) / num_others
    return torch.stack([*(hit.double() for hit in hits), average.sum()])


def _first_of_each(indices: Tensor) -> Tensor:
    """(n,) whether an index stands for the first time."""
    order = indices.argsort(stable=True)
    ascending = indices[order]
    fresh = torch.ones_like(indices, dtype=torch.bool)
    fresh[order[1:]] = ascending[1:] != ascending[:-1]
    return fresh


def _check(
    items: Items,
    gallery: Items | None,
    ks: Sequence[int],
    piece: int,
    world_size: int,
    all_gather: AllGather | None,
) -> None:
    for embeddings, labels, indices in (items, *([gallery] if gallery is not None else [])):
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
    if not ks or min(ks) < 1 or piece < 1:
        raise ValueError(
            "retrieval_metrics expects every k, chunk and block to be at least 1, "
            f"got ks={ks}, {piece}."
        )
    if world_size > 1 and all_gather is None:
        raise ValueError(
            f"retrieval_metrics on {world_size} ranks needs all_gather, to bring "
            "their items together."
        )
