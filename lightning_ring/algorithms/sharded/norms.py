"""Norms over gradients that are sharded across ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.comm.communicator import ReduceOp


@torch.no_grad()
def clip_grad_norm_(
    params: Iterable[Parameter],
    max_norm: float,
    parameters: ShardedParameters,
    norm_type: float,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all ranks' parts; collective. Returns the norm before,
    0-d, float64.

    Gradients outside the buckets are assumed to be the same on all ranks.
    """
    own: list[Any] = []
    everywhere: list[Tensor] = []
    for param in params:
        if param.grad is None:
            continue
        if param in parameters.by_param:
            own.append(parameters.own_gradient(param))
        else:
            everywhere.append(param.grad)
    total = _total_norm(own, everywhere, parameters, norm_type)
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grads in _alike(own + everywhere):
        torch._foreach_mul_(grads, scale.to(grads[0].device, grads[0].real.dtype))
    return total


def _total_norm(
    own: list[Any], everywhere: list[Tensor], parameters: ShardedParameters, norm_type: float
) -> Tensor:
    comm = parameters.comm
    device = parameters.device
    if math.isinf(norm_type):
        norms = [
            torch.linalg.vector_norm(grad, norm_type) for grad in own + everywhere if grad.numel()
        ]
        largest = torch.stack([torch.zeros((), device=device), *norms]).max().double().reshape(1)
        comm.all_reduce_(largest, op=ReduceOp.MAX, name="gradient norm").wait()
        return largest[0]
    total = (
        _power_sum(own, norm_type, device)
        + _power_sum(everywhere, norm_type, device) / comm.world_size
    )
    comm.all_reduce_(total, name="gradient norm").wait()
    return total[0] ** (1 / norm_type)


def _power_sum(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for alike in _alike(grads):
        norms = torch.stack(torch._foreach_norm(alike, norm_type))
        total += norms.double().pow_(norm_type).sum().to(device)
    return total


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """By device and type, for multi-tensor operations."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())
