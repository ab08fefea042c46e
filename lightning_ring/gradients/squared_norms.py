"""Squared norms of gradients by bucket: each rank's contribution to a sum over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.gradients.bucket import Bucket


@torch.no_grad()
def squares_by_bucket(
    params: Sequence[Parameter],
    buckets: Sequence[Bucket],
    world_size: int,
    parts: Mapping[Parameter, Tensor | None] | None = None,
) -> Tensor:
    """Sums of squares of the gradients of ``params``: for each of ``buckets``, then for gradients in no bucket.

    Their sums over ranks are squared norms. 1-D, float64, on the gradients' device; the host does not wait for it. A
    parameter without a gradient counts as zero. ``parts`` has this rank's part of each sharded gradient; other
    gradients are the same on all ranks: each rank adds 1/N of their squares.
    """
    number = {param: index for index, bucket in enumerate(buckets) for param in bucket.params}
    parts = parts or {}
    grads: list[Tensor] = []
    indices: list[int] = []
    shares: list[float] = []
    for param in params:
        grad = parts.get(param, param.grad)
        if grad is None:
            continue
        grads.append(grad.coalesce().values() if grad.is_sparse else grad)
        indices.append(number.get(param, len(buckets)))
        shares.append(1.0 if param in parts else 1.0 / world_size)
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.zeros(len(buckets) + 1, dtype=torch.float64, device=device)
    if not grads:
        return total
    # 16-bit types have too little range and precision for a sum of squares
    norms = torch._foreach_norm([g.float() if g.element_size() < 4 else g for g in grads])
    squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square_()
    squares *= torch.tensor(shares, dtype=torch.float64).to(device, non_blocking=True)
    return total.index_add_(0, torch.tensor(indices).to(device, non_blocking=True), squares)
