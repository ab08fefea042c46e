"""Squared norms of gradients, bucket by bucket: what each rank adds to a sum over ranks."""

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
    """Sum of the squares of the gradients of ``params`` in each of ``buckets``, and last of those in none.

    Summed over the ranks it is the squared norm. 1-D, float64, on the gradients' device; nothing waits for that.

    Args:
        params: Each parameter once; one without a gradient counts as zero.
        world_size: Gradients not in ``parts`` are the same on all ranks: each adds its share of them.
        parts: This rank's part of the gradient of each parameter of which it has a part only.
    """
    number = {param: index for index, bucket in enumerate(buckets) for param in bucket.params}
    parts = parts or {}
    grads: list[Tensor] = []
    places: list[int] = []
    shares: list[float] = []
    for param in params:
        grad = parts.get(param, param.grad)
        if grad is None:
            continue
        grads.append(grad.coalesce().values() if grad.is_sparse else grad)
        places.append(number.get(param, len(buckets)))
        shares.append(1.0 if param in parts else 1.0 / world_size)
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.zeros(len(buckets) + 1, dtype=torch.float64, device=device)
    if not grads:
        return total
    # 16-bit gradients are squared in float32: their own range and precision do not do for a sum
    norms = torch._foreach_norm([g.float() if g.element_size() < 4 else g for g in grads])
    squares = torch.stack([norm.to(device, torch.float64) for norm in norms]).square_()
    squares *= torch.tensor(shares, dtype=torch.float64).to(device, non_blocking=True)
    return total.index_add_(0, torch.tensor(places).to(device, non_blocking=True), squares)
