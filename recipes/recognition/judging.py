"""How well embeddings retrieve: seen and unseen classes, in galleries of their own and of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.retrieval import AllGather, NothingToFindError, retrieval_metrics
from lightning_ring.retrieval.metrics import Items


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the others, as `retrieval_metrics` takes it."""

    rank: int
    world_size: int
    all_gather: AllGather

    def metrics(self, items: Items, gallery: Items | None = None) -> dict[str, float]:
        spread = {"rank": self.rank, "world_size": self.world_size, "all_gather": self.all_gather}
        return retrieval_metrics(*items, gallery=gallery, **spread).as_dict()  # type: ignore[arg-type]


def judged(
    sets: dict[str, Items], further: Items | None, ranks: Ranks, warn: bool = True
) -> dict[str, float]:
    """Metrics by name, ``NAME/R@1`` and the like, for each of ``sets`` by name. Collective.

    - ``NAME``: its items among themselves.
    - ``NAME_in_all``, with two sets or more: among the items of all sets, and ``further`` ones.

    Args:
        sets: Items; an index stands for one item, and a label for one class, in all of them.
        further: Items that ask nothing, such as training images.
        warn: Say which metrics are left out because nothing has a match.
    """
    found: dict[str, float] = {}
    everything = [*sets.values(), *([further] if further is not None else [])]
    union: Items = tuple(torch.cat(column) for column in zip(*everything, strict=True))  # type: ignore[assignment]
    for name, items in sets.items():
        found |= _named(name, partial(ranks.metrics, items), warn)
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
