"""Objects, parameters and optimizer state from one rank to the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.comm import sealed
from lightning_ring.horovod.collectives import synchronize
from lightning_ring.horovod.context import ProcessSet, global_process_set, rank
from lightning_ring.horovod.operations import allgather, broadcast_, broadcast_async_

T = TypeVar("T")


def broadcast_object(
    obj: T,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Rank ``root_rank``'s picklable ``obj``; the others may give `None`."""
    name = name or "broadcast_object"
    mine = sealed.dumps(obj) if rank() == root_rank else b""
    size = broadcast_(torch.tensor([len(mine)]), root_rank, f"{name}.size", process_set)
    data = _bytes(mine) if mine else torch.empty(int(size), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.object", process_set)
    found: T = obj if rank() == root_rank else sealed.loads(data.numpy().tobytes())
    return found


def _bytes(pickled: bytes) -> Tensor:
    return torch.frombuffer(bytearray(pickled), dtype=torch.uint8)


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's picklable ``obj``, of any types, by rank of the process set."""
    name = name or "allgather_object"
    mine = _bytes(sealed.dumps(obj))
    sizes = allgather(torch.tensor([mine.numel()]), f"{name}.sizes", process_set).tolist()
    everyones = allgather(mine, f"{name}.objects", process_set)
    return [sealed.loads(part.numpy().tobytes()) for part in everyones.split(sizes)]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[Tensor],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace parameters by rank ``root_rank``'s, in place.

    ``params`` are ``model.state_dict()``, ``model.named_parameters()`` or ``model.parameters()``.
    Values that are no tensors are left alone.
    """
    given = params.items() if isinstance(params, Mapping) else params
    named = [
        pair if isinstance(pair, tuple) else (f"parameter.{index}", pair)
        for index, pair in enumerate(given)
    ]
    handles = [
        broadcast_async_(value.detach(), root_rank, name, process_set)
        for name, value in named
        if isinstance(value, Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: Optimizer,
    root_rank: int,
    model: Any = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace the optimizer's state and groups by rank ``root_rank``'s. ``model`` is ignored."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = optimizer.state_dict() if rank() == root_rank else None
    state = broadcast_object(state, root_rank, "optimizer_state", process_set)
    assert state is not None
    if rank() != root_rank:
        optimizer.load_state_dict(state)
