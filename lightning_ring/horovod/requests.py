"""What a rank submits, what it tells the others of it, and whether the ranks' tensors fit together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Meta:
    """What the other ranks have to know of a request. ``root`` is a rank of the process set."""

    kind: str  # "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier" or "join"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    splits: tuple[int, ...] = ()
    device: str = "cpu"
    group: tuple[str, int] = ("", 1)  # of a grouped call: its name and the number of its tensors


@dataclass(slots=True, eq=False)
class Request:
    """A submitted collective. ``result`` or ``error`` is there once ``done`` is set."""

    name: str
    meta: Meta
    tensor: Tensor | None = None
    output: Tensor | None = None  # where the result goes; `None`: into new memory
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    received_splits: Tensor | None = None
    error: str | None = None
    cause: BaseException | None = None  # of ``error``: another rank failed


def problem_of(name: str, metas: dict[int, Meta], joined: Sequence[int]) -> str | None:
    """Why the ranks' requests of one name cannot run together; the same text on every rank."""
    ranks, first = sorted(metas), metas[min(metas)]
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
            return f"{name}: the ranks submitted it with different {what}: {_by_rank(ranks, values)}."
    whole = first.kind in ("allreduce", "broadcast", "reducescatter")
    shapes = [metas[rank].shape if whole else metas[rank].shape[1:] for rank in ranks]
    if len(set(shapes)) > 1 or len({len(metas[rank].shape) for rank in ranks}) > 1:
        beyond = "" if whole else " beyond the first dimension"
        told = _by_rank(ranks, [metas[rank].shape for rank in ranks])
        return f"{name}: the ranks submitted tensors of different shapes{beyond}: {told}."
    if joined and first.kind not in ("allreduce", "barrier"):
        return f"{name}: {first.kind} needs every rank, and rank(s) {', '.join(map(str, joined))} have called join()."
    return None


def _by_rank(ranks: Sequence[int], values: Sequence[Any]) -> str:
    return ", ".join(f"rank {rank} {value}" for rank, value in zip(ranks, values, strict=True))


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """``tensor`` times ``factor``: integers by way of float64, 16-bit floats on the CPU by way of float32."""
    if factor == 1.0:
        return tensor
    if not tensor.is_floating_point():
        return (tensor.double() * factor).to(tensor.dtype)
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return (tensor.float() * factor).to(tensor.dtype)
    return tensor * factor
