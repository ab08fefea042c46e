"""What a rank submits, what it tells the others of it, and whether the ranks' tensors fit
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ring.errors import HorovodInternalError

JOIN = "join"  # the name and the kind of `join`
# the kind, and the beginning of the name, of what `DistributedOptimizer` announces
GRADIENTS = "gradients"


class Meta(NamedTuple):
    """What the other ranks have to know of a request. ``root`` is a rank of the process set.

    A tuple, since a step makes and compares one a gradient.
    """

    kind: str  # a collective's name; or "barrier", "meeting", "gradients" or "join"
    shapes: tuple[tuple[int, ...], ...] = ()  # of its tensors: several in a grouped call
    dtypes: tuple[torch.dtype, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    device: str = "cpu"


@dataclass(slots=True, eq=False)
class Submission:
    """A submitted collective, of one tensor or of a group. ``result`` is there once it is ``done``:
    a list, as long as ``tensors``.
    """

    name: str
    meta: Meta
    tensors: Sequence[Tensor] = ()
    in_place: bool = False  # results go into the tensors, else into new memory
    since: float = field(default_factory=time.monotonic)
    number: int | None = None  # under which the others are told of it
    done: bool = False
    result: Any = None
    error: str | None = None
    cause: BaseException | None = None  # of ``error``: another rank failed
    on_error: Callable[[HorovodInternalError], object] | None = None

    def fail(self, error: str, cause: BaseException | None) -> None:
        self.error, self.cause = error, cause
        if self.on_error is not None:
            self.on_error(self._exception())

    def outcome(self) -> Any:
        """``result``, or the error that the collective ended with."""
        if self.error is not None:
            raise self._exception()
        return self.result

    def _exception(self) -> HorovodInternalError:
        exception = HorovodInternalError(self.error)
        exception.__cause__ = self.cause
        return exception


Metas = Mapping[int, Meta]
"""What each rank of a process set has submitted under one name."""

_EQUAL = {
    "kind": "operations",
    "device": "devices",
    "op": "reduce operations",
    "prescale": "prescale factors",
    "postscale": "postscale factors",
    "root": "root ranks",
}


def problem_of(
    name: str, metas: Metas, joined: Sequence[int], members: Sequence[int]
) -> str | None:
    """Why the ranks' requests of one name cannot run together; the same text on every rank.

    ``members`` are the ranks of the process set by their numbers in the job, which the text shows.
    """

    def differ(what: str, values: Sequence[Any]) -> str | None:
        if len(set(values)) == 1:
            return None
        told = [f"rank {members[rank]} {one}" for rank, one in zip(ranks, values, strict=True)]
        return f"{name}: the ranks submitted it with different {what}: {', '.join(told)}."

    ranks = sorted(metas)
    everyones = [metas[rank] for rank in ranks]
    first = everyones[0]
    for attribute, what in _EQUAL.items():
        if problem := differ(what, [getattr(meta, attribute) for meta in everyones]):
            return problem
    if problem := differ("numbers of tensors", [len(meta.shapes) for meta in everyones]):
        return problem
    # rows of the first dimension may differ where each rank's are kept apart
    whole = first.kind in ("allreduce", "broadcast", "reducescatter")
    shapes_differ = "shapes" if whole else "shapes beyond the first dimension"
    for index in range(len(first.shapes)):
        dtypes = [str(meta.dtypes[index]).removeprefix("torch.") for meta in everyones]
        shapes = [tuple(meta.shapes[index]) for meta in everyones]
        compared = shapes if whole else [(len(shape), *shape[1:]) for shape in shapes]
        problem = differ("data types", dtypes)
        if problem is None and len(set(compared)) > 1:
            problem = differ(shapes_differ, shapes)
        if problem is not None:
            return problem
    if joined and first.kind not in ("allreduce", "barrier", GRADIENTS):
        absent = ", ".join(str(members[rank]) for rank in joined)
        return f"{name}: {first.kind} needs every rank, and rank(s) {absent} have called join()."
    return None
