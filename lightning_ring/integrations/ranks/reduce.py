"""Collectives that Lightning and Fabric offer to users, over a `Communicator`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.data import BatchStatus

_OPS: dict[Any, ReduceOp] = {  # in the spelling of `sync_dist`, torchmetrics and users
    **{name: op for op in ReduceOp for name in (op.value, op.value.upper())},
    **{getattr(torch.distributed.ReduceOp, op.name): op for op in ReduceOp},
    "mean": ReduceOp.AVG,
    "MEAN": ReduceOp.AVG,
}


def reduce_op_of(spelled: Any) -> ReduceOp | None:
    """The `ReduceOp` of a name in Lightning or torch; `None` for an operation that only torch
    has.
    """
    return _OPS.get(spelled)


def agree_on_gather(tensor: Tensor, comm: Communicator, group: Any) -> None:
    """Before a gather of all ranks in torch's default ``group``: one that calls another
    collective would hang there.
    """
    if group is None or group is torch.distributed.group.WORLD:
        comm.barrier(name=f"all_gather of {tensor.dtype} {tuple(tensor.shape)}")


def reduce_(tensor: Tensor, comm: Communicator, op: ReduceOp, status: BatchStatus | None) -> Tensor:
    """Reduce ``tensor`` over the ranks, in place, and return it. A mean of integers is a new float
    tensor.

    Lightning divides epoch means by such a mean, which DDP truncates to an integer.

    ``status`` is given inside a training step if ranks may run out of data. These repeat their last
    batch: they add nothing to a sum, and a mean divides by the number of the other ranks.
    """
    flat = tensor.detach().clone(memory_format=torch.contiguous_format)
    if status is not None and not status.has_data and op in (ReduceOp.SUM, ReduceOp.AVG):
        flat.zero_()
    divide_by = status.active_ranks if status is not None else comm.world_size
    through_autograd = tensor.requires_grad and torch.is_grad_enabled()
    divide_here = op is ReduceOp.AVG and (
        status is not None or not flat.is_floating_point() or through_autograd
    )
    comm.all_reduce_(flat, op=ReduceOp.SUM if divide_here else op, name="reduce").wait()
    if divide_here and not flat.is_floating_point():
        return flat / divide_by
    # without autograd, as torch.distributed: a reduced loss keeps the gradient of this rank's loss,
    # a mean 1/N of it
    tensor.detach().copy_(flat)
    return tensor.div_(divide_by) if divide_here else tensor
