"""Averages of many tensors over the ranks, in messages of a bucket's size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp, Work

_MESSAGE_BYTES = 25 * 2**20


@torch.no_grad()
def average_(tensors: Iterable[Tensor], comm: Communicator, name: str) -> None:
    """Replace ``tensors`` (same shapes and dtypes on all ranks) by their averages over the ranks. Blocks."""
    works: list[tuple[Work, list[Tensor], Tensor]] = []
    for index, message in enumerate(_messages(tensors)):
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
        works.append((comm.all_reduce_(flat, op=ReduceOp.AVG, name=f"{name}, message {index}"), message, flat))
    for work, message, flat in works:
        work.wait()
        parts = flat.split([tensor.numel() for tensor in message])
        torch._foreach_copy_(message, [part.view(each.shape) for part, each in zip(parts, message, strict=True)])


def _messages(tensors: Iterable[Tensor]) -> Sequence[list[Tensor]]:
    """Tensors of one dtype and device together."""
    closed: list[list[Tensor]] = []
    open_: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        message = open_.setdefault((tensor.dtype, tensor.device), [])
        if message and sum(other.nbytes for other in message) + tensor.nbytes > _MESSAGE_BYTES:
            closed.append(message)
            message = open_[tensor.dtype, tensor.device] = []
        message.append(tensor.detach())
    return [*closed, *open_.values()]
