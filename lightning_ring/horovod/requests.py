"""What a rank submits, what it tells the others of it, and whether the ranks' tensors fit
together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

JOIN = "join"  # the name and the kind of `join`
# the kind, and the beginning of the name, of what `DistributedOptimizer` announces
GRADIENTS = "gradients"


class Meta(NamedTuple):
    """What the other ranks have to know of a request. ``root`` is a rank of the process set.

    A tuple, since a step makes and compares one a gradient.
    """

    kind: str  # a collective's name; or "barrier", "meeting", "gradients" or "join"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    group: tuple[str, int] = ("", 1)  # of a grouped call: its name and the number of its tensors


class Submission:
    """A submitted collective. ``result`` or ``error`` is there once it is ``done``."""

    __slots__ = (
        "cause",
        "done",
        "error",
        "meta",
        "name",
        "number",
        "on_error",
        "output",
        "result",
        "since",
        "tensor",
    )

    def __init__(
        self, name: str, meta: Meta, tensor: Tensor | None = None, output: Tensor | None = None
    ) -> None:
        self.name = name
        self.meta = meta
        self.tensor = tensor
        self.output = output  # where the result goes; `None`: into new memory
        self.since = time.monotonic()
        self.number: int | None = None  # under which the others are told of it
        self.done = False
        self.result: Any = None
        self.error: str | None = None
        self.cause: BaseException | None = None  # of ``error``: another rank failed
        # called with both
        self.on_error: Callable[[str, BaseException | None], object] | None = None


Metas = Mapping[int, Meta]
"""What each rank of a process set has submitted under one name."""


def problem_of(
    name: str, metas: Metas, joined: Sequence[int], members: Sequence[int]
) -> str | None:
    """Why the ranks' requests of one name cannot run together; the same text on every rank.

    ``members`` are the ranks of the process set by their numbers in the job, which the text shows.
    """
    ranks = sorted(metas)
    shown = [members[rank] for rank in ranks]
    first = metas[ranks[0]]
    for what, attribute in (
        ("operations", "kind"),
        ("data types", "dtype"),
        ("devices", "device"),
        ("reduce operations", "op"),
        ("prescale factors", "prescale"),
        ("postscale factors", "postscale"),
        ("root ranks", "root"),
        ("groups", "group"),
    ):
        values = [getattr(metas[rank], attribute) for rank in ranks]
        if len(set(values)) > 1:
            return (
                f"{name}: the ranks submitted it with different {what}: {_by_rank(shown, values)}."
            )
    whole = first.kind in ("allreduce", "broadcast", "reducescatter")
    shapes = [metas[rank].shape if whole else metas[rank].shape[1:] for rank in ranks]
    if len(set(shapes)) > 1 or len({len(metas[rank].shape) for rank in ranks}) > 1:
        beyond = "" if whole else " beyond the first dimension"
        told = _by_rank(shown, [tuple(metas[rank].shape) for rank in ranks])
        return f"{name}: the ranks submitted tensors of different shapes{beyond}: {told}."
    if joined and first.kind not in ("allreduce", "barrier", GRADIENTS):
        absent = ", ".join(str(members[rank]) for rank in joined)
        return f"{name}: {first.kind} needs every rank, and rank(s) {absent} have called join()."
    return None


def _by_rank(ranks: Sequence[int], values: Sequence[Any]) -> str:
    texts = (str(value).removeprefix("torch.") for value in values)
    return ", ".join(f"rank {rank} {text}" for rank, text in zip(ranks, texts, strict=True))


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """``tensor`` times ``factor``: integers by way of float64, 16-bit floats on the CPU by way
    of float32.
    """
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor
