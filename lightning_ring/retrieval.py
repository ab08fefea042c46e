"""How well embeddings retrieve: hit rates R@K and MAP@R, in chunks, over the embeddings of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

AllGather = Callable[[Tensor], Sequence[Tensor]]
"""Every rank's tensor, by rank, for a tensor of one shape and dtype on all ranks: `Communicator.all_gather` is one."""


class NothingToFindError(ValueError):
    """No two items share a class: the same on every rank."""


@dataclass(frozen=True, slots=True)
class RetrievalMetrics:
    """The results of `retrieval_metrics`; rates are means over ``num_queries``.

    Attributes:
        hit_rate: R@K for each K asked for: the share of queries with an item of their class among the K nearest.
        map_at_r: Mean over queries of the average precision among the R nearest, R being the number of other items of
            the query's class (Musgrave, Belongie, Lim, "A metric learning reality check", ECCV 2020, section 3.2).
        num_queries: Items that have another one of their class.
        num_without_match: Items that have none; they stay in the gallery but ask nothing.
        num_duplicates: Items dropped because another with the same index was there (samplers pad with repeats).
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
    ks: Sequence[int] = (1, 10, 100),
    chunk: int = 1024,
    rank: int = 0,
    world_size: int = 1,
    all_gather: AllGather | None = None,
) -> RetrievalMetrics:
    """Each item of all ranks is looked up among all the others, by cosine similarity. The same on every rank.

    An item never finds itself. Each rank looks up its part of the queries, ``chunk`` at a time, so that memory holds
    ``chunk`` times the number of items, and not its square.

    Args:
        embeddings: (n, d) of this rank; n may differ between ranks. Any floating dtype; compared in float32 (float64 if
            they are).
        labels: (n,) integer classes.
        indices: (n,) position of each item in the data set, by which repeats are told from items.
        ks: The K of R@K.
        chunk: Queries looked up at a time.
        rank, world_size: Of this process.
        all_gather: With more than one rank: brings tensors together.

    Raises:
        ValueError: Shapes do not fit, values are not finite, or ``all_gather`` is missing.
        NothingToFindError: There is no item with a match (a `ValueError` too).
    """
    _check(embeddings, labels, indices, ks, chunk, world_size, all_gather)
    if all_gather is not None and world_size > 1:
        embeddings, labels, indices = (gather_rows(tensor, all_gather) for tensor in (embeddings, labels, indices))
    if not bool(torch.isfinite(embeddings).all()):
        raise ValueError("retrieval_metrics: some embeddings are NaN or infinite; the model has diverged.")
    kept = _first_of_each(indices)
    gallery = normalize(embeddings[kept].to(torch.promote_types(embeddings.dtype, torch.float32)), dim=1)
    _, labels, sizes = labels[kept].unique(return_inverse=True, return_counts=True)
    num_others = sizes[labels] - 1
    queries = (num_others > 0).nonzero().squeeze(1)
    if not len(queries):
        raise NothingToFindError(
            f"retrieval_metrics: of {len(labels)} items no two share a class, so nothing can be found."
        )
    sums = torch.zeros(len(ks) + 1, dtype=torch.float64, device=gallery.device)
    for part in queries[rank::world_size].split(chunk):
        sums += _sums_of(part, gallery, labels, num_others[part], ks)
    if all_gather is not None and world_size > 1:
        sums = torch.stack(list(all_gather(sums))).sum(0)
    *hits, precision = (sums / len(queries)).tolist()
    return RetrievalMetrics(
        hit_rate=dict(zip(ks, hits, strict=True)),
        map_at_r=precision,
        num_queries=len(queries),
        num_without_match=len(labels) - len(queries),
        num_duplicates=len(embeddings) - len(labels),
    )


def nearest(queries: Tensor, gallery: Tensor, k: int, exclude: Tensor | None = None) -> Tensor:
    """(q, k) indices of the ``k`` items of ``gallery`` (n, d) most similar to each of ``queries`` (q, d), best first.

    ``exclude`` (q,) names for each query an item of the gallery that does not count, itself for instance. Rows are
    taken as normalised.
    """
    similarity = queries @ gallery.T
    if exclude is not None:
        similarity.scatter_(1, exclude[:, None], -torch.inf)
    return similarity.topk(k, dim=1).indices


def gather_rows(tensor: Tensor, all_gather: AllGather) -> Tensor:
    """The rows of all ranks' ``tensor``, one rank after another; ranks may have different numbers of rows."""
    sizes = [int(size) for size in all_gather(torch.tensor([len(tensor)], device=tensor.device))]
    padded = pad(tensor, [0, 0] * (tensor.ndim - 1) + [0, max(sizes) - len(tensor)])
    return torch.cat([part[:size] for part, size in zip(all_gather(padded), sizes, strict=True)])


def _sums_of(part: Tensor, gallery: Tensor, labels: Tensor, num_others: Tensor, ks: Sequence[int]) -> Tensor:
    """Summed over the queries ``part``: a hit for each of ``ks``, and the average precision at R."""
    depth = min(max(*ks, int(num_others.max())), len(gallery) - 1)
    found = nearest(gallery[part], gallery, depth, exclude=part)
    right = labels[found] == labels[part][:, None]
    hits = [right[:, :k].any(1).sum() for k in ks]
    position = torch.arange(1, depth + 1, device=gallery.device)
    counts = right & (position <= num_others[:, None])
    precision = counts.cumsum(1).double() / position
    average = (precision * counts).sum(1) / num_others
    return torch.stack([*(hit.double() for hit in hits), average.sum()])


def _first_of_each(indices: Tensor) -> Tensor:
    """Where each distinct value of ``indices`` first stands, in ascending order of the values."""
    order = indices.argsort(stable=True)
    ascending = indices[order]
    fresh = torch.ones_like(ascending, dtype=torch.bool)
    fresh[1:] = ascending[1:] != ascending[:-1]
    return order[fresh]


def _check(
    embeddings: Tensor,
    labels: Tensor,
    indices: Tensor,
    ks: Sequence[int],
    chunk: int,
    world_size: int,
    all_gather: AllGather | None,
) -> None:
    if embeddings.ndim != 2 or labels.shape != embeddings.shape[:1] or indices.shape != labels.shape:
        raise ValueError(
            "retrieval_metrics expects embeddings (n, d), labels (n,) and indices (n,), got "
            f"{tuple(embeddings.shape)}, {tuple(labels.shape)} and {tuple(indices.shape)}."
        )
    if not ks or min(ks) < 1 or chunk < 1:
        raise ValueError(f"retrieval_metrics expects every k and chunk to be at least 1, got ks={ks}, chunk={chunk}.")
    if world_size > 1 and all_gather is None:
        raise ValueError(f"retrieval_metrics on {world_size} ranks needs all_gather, to bring their items together.")
