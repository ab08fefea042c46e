"""Exchanges between ranks that gradients pass through, over a `Communicator`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp


def gather_rows_with_gradients(rows: Tensor, comm: Communicator) -> Tensor:
    """The rows of all ranks, one rank after another; all have equally many. For a loss whose parts
    lie on the ranks.

    Backward sums the ranks' gradients and multiplies by their number, because the strategy takes
    the mean of what follows.
    """
    gathered: Tensor = _GatheredRows.apply(rows, comm)
    return gathered


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Communicator) -> Tensor:
        ctx.comm, ctx.num = comm, len(rows)
        return torch.cat(comm.all_gather(rows.contiguous(), name="embeddings"))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        comm, num = ctx.comm, ctx.num
        total = gradient.clone(memory_format=torch.contiguous_format)
        comm.all_reduce_(total, name="gradients of embeddings").wait()
        return total[comm.rank * num : (comm.rank + 1) * num] * comm.world_size, None


def sum_over_ranks(values: Tensor, comm: Communicator | None) -> Tensor:
    """The ranks' sum. Backward hands the gradient on as it is: all ranks compute the same loss
    of the sum.
    """
    if comm is None:
        return values
    total: Tensor = _Summed.apply(values, comm)
    return total


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, comm: Communicator) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        comm.all_reduce_(total, name="softmax").wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def max_over_ranks(values: Tensor, comm: Communicator | None) -> Tensor:
    """The ranks' maximum, elementwise, without gradients."""
    if comm is None:
        return values
    greatest = values.detach().clone()
    comm.all_reduce_(greatest, op=ReduceOp.MAX, name="greatest logits").wait()
    return greatest
