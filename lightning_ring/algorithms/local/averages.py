"""Averages of many tensors over the ranks, in messages of a bucket's size."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from lightning_ring.comm.communicator import ChainedWork, Communicator, ReduceOp, Work
from lightning_ring.comm.replicate import messages_of
from lightning_ring.gradients.compression import Compressor

_MESSAGE_BYTES = 25 * 2**20


def average_(tensors: Iterable[Tensor], comm: Communicator, name: str) -> None:
    """Replace ``tensors`` (same shapes and dtypes on all ranks) by their averages over the
    ranks. Blocks.
    """
    for work in start_averages(tensors, comm, name):
        work.wait()


@torch.no_grad()
def start_averages(
    tensors: Iterable[Tensor], comm: Communicator, name: str, compressor: Compressor | None = None
) -> list[Work]:
    """Start to replace ``tensors`` by their averages over the ranks.

    Args:
        compressor: Of the dtypes that it accepts. It keeps no state from call to call.
    """
    works: list[Work] = []
    for index, message in enumerate(messages_of(tensors, _MESSAGE_BYTES)):
        flat = torch.cat([tensor.reshape(-1) for tensor in message])
        called = f"{name}, message {index}"
        if compressor is not None and compressor.accepts(flat.dtype):
            work = compressor.all_reduce(flat, comm, name=called)
        else:
            work = comm.all_reduce_(flat, op=ReduceOp.AVG, name=called)
        works.append(ChainedWork(work, partial(_take_apart, flat, message)))
    return works


def _take_apart(flat: Tensor, message: list[Tensor]) -> None:
    parts = flat.split([tensor.numel() for tensor in message])
    torch._foreach_copy_(
        message, [part.view(each.shape) for part, each in zip(parts, message, strict=True)]
    )
