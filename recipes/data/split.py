"""A part of every class set aside."""

from __future__ import annotations

import torch
from torch import Tensor


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the rest and of a random ``fraction`` of every class, both sorted. Depends on
    the arguments only.
    """
    generator = torch.Generator().manual_seed(seed)
    picked = []
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator)
        picked.append(members[order[: round(fraction * len(members))]])
    chosen = torch.cat(picked).sort().values
    rest = torch.ones(len(labels), dtype=torch.bool)
    rest[chosen] = False
    return rest.nonzero().flatten(), chosen
