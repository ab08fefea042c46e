"""How well embeddings retrieve: seen and unseen classes, in galleries of their own, of equal
size and of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_ring.retrieval import AllGather, NothingToFindError, gather_rows, retrieval_metrics
from lightning_ring.retrieval.metrics import Items

DRAWS = 5  # of galleries of equal size, whose metrics are averaged
PIXELS = 8  # a side, of the baseline that learns nothing


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others, as `retrieval_metrics` takes it."""

    rank: int
    world_size: int
    all_gather: AllGather

    def metrics(self, items: Items, gallery: Items | None = None) -> dict[str, float]:
        spread = {"rank": self.rank, "world_size": self.world_size, "all_gather": self.all_gather}
        return retrieval_metrics(*items, gallery=gallery, **spread).as_dict()  # type: ignore[arg-type]

    def rows(self, tensor: Tensor) -> Tensor:
        return gather_rows(tensor, self.all_gather) if self.world_size > 1 else tensor


def pixels(images: Tensor) -> Tensor:
    """A baseline that learns nothing: ``images`` shrunk to `PIXELS` a side, each without its
    mean.
    """
    small = F.adaptive_avg_pool2d(images.float(), PIXELS).flatten(1)
    return small - small.mean(1, keepdim=True)


def judged(
    sets: dict[str, Items], further: Items | None, ranks: Ranks, warn: bool = True
) -> dict[str, float]:
    """Metrics by name, ``NAME/R@1`` and the like, for each of ``sets`` by name. Collective.

    - ``NAME``: its items among themselves.
    - ``NAME_equal``, with two sets or more: among items of as many classes, with as many items
      each, for all sets alike. A gallery with more classes is harder, so that only these compare
      seen and unseen classes.
    - ``NAME_in_all``, with two sets or more: among the items of all sets, and ``further`` ones.

    Args:
        sets: Items; an index stands for one item, and a label for one class, in all of them.
        further: Items that ask nothing, such as training images.
        warn: Say which metrics are left out because nothing has a match.
    """
    found: dict[str, float] = {}
    equal = _equal_sizes(sets, ranks) if len(sets) > 1 else None
    everything = [*sets.values(), *([further] if further is not None else [])]
    union: Items = tuple(torch.cat(column) for column in zip(*everything, strict=True))  # type: ignore[assignment]
    for name, items in sets.items():
        found |= _named(name, partial(ranks.metrics, items), warn)
        if equal is not None:
            found |= _named(f"{name}_equal", partial(_in_equal, items, *equal, ranks), warn)
        if len(sets) > 1:
            found |= _named(f"{name}_in_all", partial(ranks.metrics, items, union), warn)
    return found


def _named(name: str, metrics: Callable[[], dict[str, float]], warn: bool) -> dict[str, float]:
    """Metrics under ``name``; none, with a warning, where nothing has a match, as in a few
    batches.
    """
    try:
        return {f"{name}/{metric}": value for metric, value in metrics().items()}
    except NothingToFindError as error:
        if warn:
            rank_zero_warn(
                f"{name}/R@1, MAP@R and the like are left out of this evaluation ({error}). Give "
                "it two images of some class: more batches, or another split."
            )
        return {}


def _equal_sizes(sets: dict[str, Items], ranks: Ranks) -> tuple[int, int] | None:
    """Classes, and items a class, that every set has; ``None`` where one has no class with two
    items.
    """
    counts = [ranks.rows(labels).unique(return_counts=True)[1] for _, labels, _ in sets.values()]
    each = min(int(count.median()) for count in counts)
    classes = min(int((count >= each).sum()) for count in counts)
    return (classes, each) if each > 1 and classes > 1 else None


def _in_equal(items: Items, classes: int, each: int, ranks: Ranks) -> dict[str, float]:
    """Mean over `DRAWS` galleries of ``classes`` x ``each`` items, the same on every rank."""
    embeddings, labels, indices = items
    all_indices, order = ranks.rows(indices).cpu().sort()  # the same draws on any number of ranks
    all_labels = ranks.rows(labels).cpu()[order]
    numbers, counts = all_labels.unique(return_counts=True)
    draws = []
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        rich = numbers[counts >= each]
        rich = rich[torch.randperm(len(rich), generator=generator)][:classes]
        shuffled = torch.randperm(len(all_labels), generator=generator)
        shuffled = shuffled[torch.isin(all_labels[shuffled], rich)]
        by_class = shuffled[all_labels[shuffled].argsort(stable=True)]
        starts = torch.searchsorted(all_labels[by_class], all_labels[by_class])
        chosen = by_class[torch.arange(len(by_class)) - starts < each]
        mine = torch.isin(indices, all_indices[chosen].to(indices.device))
        draws.append(ranks.metrics((embeddings[mine], labels[mine], indices[mine])))
    return {name: sum(draw[name] for draw in draws) / DRAWS for name in draws[0]}
