"""Squared norm of gradients: each rank's contribution to a sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.gradients.sharded_gradient import ShardedGradient


@torch.no_grad()
def sum_of_squares(params: Sequence[Parameter], world_size: int) -> Tensor:
    """What this rank adds to the squared norm of the gradients of ``params``.

    0-d, float64, on the gradients' device; the host does not wait for it. A parameter without a
    gradient counts as zero. Of a `ShardedGradient` this rank has a part. Other gradients are the
    same on ``world_size`` ranks: each adds 1/N of their squares.
    """
    grads = []
    for grad in (param.grad for param in params):
        if isinstance(grad, ShardedGradient):
            grads.append((grad.own(grad.part), 1.0))
        elif grad is not None:
            values = grad.coalesce().values() if grad.is_sparse else grad
            grads.append((values, 1.0 / world_size))
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    # 16-bit types have too little range and precision for a sum of squares
    norms = torch._foreach_norm(
        [grad.float() if grad.element_size() < 4 else grad for grad, _ in grads]
    )
    device = grads[0][0].device
    squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square_()
    shares = torch.tensor([share for _, share in grads], dtype=torch.float64)
    return squares.dot(shares.to(device, non_blocking=True))
