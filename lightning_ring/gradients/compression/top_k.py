"""The largest gradients only.

Sources: Aji and Heafield, "Sparse communication for distributed gradient descent" (2017),
    arXiv:1704.05021; Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory" (2018), arXiv:1809.07599, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ReduceOp, Work
from lightning_ring.comm.host_copy import on_host
from lightning_ring.errors import check_arguments
from lightning_ring.gradients.compression.between_nodes import MIN_NUMEL, BetweenNodes, Part
from lightning_ring.gradients.compression.error_feedback import ErrorFeedback

_SAMPLES = 1 << 16  # values from which a threshold is guessed
_SLACK = 1.3  # of the number that a guessed threshold is to leave


class Largest(BetweenNodes):
    """Each rank sends the share ``ratio`` of a bucket with the largest magnitudes: values and
    32-bit places.

    Every rank gathers the others' and adds them up, so that bytes grow with the number of ranks.
    From ratio · ranks = 1 on, a bucket travels whole.

    Attributes:
        sent: By flat tensor, the places that this rank sent last.
    """

    def __init__(self, ratio: float, min_numel: int = MIN_NUMEL, name: str = "topk") -> None:
        super().__init__(min_numel)
        self.name = name
        self.ratio = ratio
        self.sent: dict[Tensor, Tensor] = {}

    def forget_tensors(self) -> None:
        self.sent.clear()

    def average(self, part: Part) -> Iterator[Work]:
        values, group = part.values, part.group
        count = math.ceil(self.ratio * values.numel())
        if self.ratio * group.world_size >= 1:
            if part.lost is not None:
                part.lost.zero_()
            yield group.all_reduce_(values, op=ReduceOp.AVG, name=part.name)
            return
        places = largest(values, count)
        self.sent[part.whole] = places
        rows = torch.empty(group.world_size, 2, count, device=values.device)
        rows[group.shard_index, 0] = values[places]
        rows[group.shard_index, 1].view(torch.int32).copy_(places)
        work = group.all_gather_(rows.view(-1), name=part.name)
        if part.lost is not None:
            # an assignment would copy its 0 to a GPU, and wait for that
            part.lost.copy_(values).index_fill_(0, places, 0.0)
        values.zero_()
        yield work
        for theirs, at in rows:
            values.index_add_(0, at.view(torch.int32), theirs, alpha=1 / group.world_size)


class TopK(ErrorFeedback):
    """``compression="topk"``: the largest gradients g + e of each bucket travel, the others become
    e.

    Args:
        ratio: Share of a bucket's gradients that travels.
        min_numel: As of `BetweenNodes`.

    Raises:
        ConfigurationError: An argument cannot work.
    """

    def __init__(self, ratio: float = 0.01, min_numel: int = MIN_NUMEL) -> None:
        super().__init__(Largest(checked_ratio("TopK", ratio), min_numel))


def checked_ratio(caller: str, ratio: float) -> float:
    works = isinstance(ratio, (int, float)) and 0 < ratio < 1
    what = "the share of the gradients that travels, such as 0.01"
    check_arguments(caller, works, what, ratio=ratio)
    return float(ratio)


def largest(values: Tensor, count: int) -> Tensor:
    """Places of the ``count`` elements of 1-D ``values`` with the largest magnitudes; NaN counts as
    the largest.

    A threshold from a sample leaves few candidates (section 3.1 of DGC, arXiv:1712.01887), of which
    the largest are chosen exactly. If it leaves too few, all are compared. So they are on a GPU,
    where the host would have to wait for the number of candidates.
    """
    magnitudes = values.abs()
    stride = values.numel() // _SAMPLES if on_host(values) else 0
    if stride > 1:
        sample = magnitudes[::stride]
        kept = math.ceil(_SLACK * count / values.numel() * sample.numel()) + 16
        if kept < sample.numel() // 2:
            threshold = sample.topk(kept, sorted=False).values.min()
            candidates = (magnitudes < threshold).logical_not_().nonzero().squeeze(1)
            if candidates.numel() >= count:
                return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
    return magnitudes.topk(count, sorted=False).indices
