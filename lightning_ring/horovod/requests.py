"""What a rank submits, and whether the ranks' tensors fit together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ring.errors import HorovodInternalError

JOIN = "join"  # the name and the kind of `join`
# kind and prefix of what `DistributedOptimizer` announces
GRADIENTS = "gradients"


class Meta(NamedTuple):
    """What the other ranks know of a request. ``root`` is a rank of the process set.

    A tuple, since a step makes one a gradient.
    """

    kind: str  # a collective's name; or "barrier", "meeting", "gradients" or "join"
    shapes: tuple[tuple[int, ...], ...] = ()  # several in a grouped call
    dtypes: tuple[torch.dtype, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    device: str = "cpu"


@dataclass(slots=True, eq=False)
class Submission:
    """A submitted collective. ``result`` is a list, as long as ``tensors``, once it is ``done``."""

    name: str
    meta: Meta
    tensors: Sequence[Tensor] = ()
    in_place: bool = False  # results go into the tensors, else into new memory
    since: float = field(default_factory=time.monotonic)
    number: int | None = None
    done: bool = False
    result: Any = None
    error: HorovodInternalError | None = None
    on_error: Callable[[HorovodInternalError], object] | None = None

    def fail(self, error: str, cause: BaseException | None) -> None:
        self.error = HorovodInternalError(error)
        self.error.__cause__ = cause
        if self.on_error is not None:
            self.on_error(self.error)

    def outcome(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.result


Metas = Mapping[int, Meta]
"""What each rank of a process set has submitted under one name."""


def problem_of(
    name: str, metas: Metas, joined: Sequence[int], members: Sequence[int]
) -> str | None:
    """Why the ranks' requests of one name cannot run together, alike on every rank.

    ``members`` are the ranks of the process set by their numbers in the job.
    """
    ranks = sorted(metas)
    for facts in zip(*(_facts(metas[rank]) for rank in ranks), strict=False):
        if len(set(facts)) > 1:
            pairs = zip(ranks, facts, strict=True)
            told = [f"rank {members[rank]} {value}" for rank, (_, value) in pairs]
            what = facts[0][0]
            return f"{name}: the ranks submitted it with different {what}: {', '.join(told)}."
    kind = metas[ranks[0]].kind
    if joined and kind not in ("allreduce", "barrier", GRADIENTS):
        absent = ", ".join(str(members[rank]) for rank in joined)
        return f"{name}: {kind} needs every rank, and rank(s) {absent} have called join()."
    return None


def _facts(meta: Meta) -> Iterator[tuple[str, object]]:
    yield "operations", meta.kind
    yield "devices", meta.device
    yield "reduce operations", meta.op
    yield "prescale factors", meta.prescale
    yield "postscale factors", meta.postscale
    yield "root ranks", meta.root
    yield "numbers of tensors", len(meta.shapes)
    whole = meta.kind in ("allreduce", "broadcast", "reducescatter")
    for shape, dtype in zip(meta.shapes, meta.dtypes, strict=True):
        yield "data types", str(dtype).removeprefix("torch.")
        if whole:
            yield "shapes", tuple(shape)
        else:  # each rank's rows are kept apart, and may be more or fewer
            yield "shapes beyond the first dimension", tuple(shape[1:])
