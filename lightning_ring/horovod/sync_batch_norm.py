"""`SyncBatchNorm`: batch statistics over the samples of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ring.horovod.collectives import Sum, start, start_reduction, synchronize
from lightning_ring.horovod.context import global_process_set, size


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of all ranks' samples together, whose numbers
    may differ.

    In evaluation the running statistics are used. On CPUs as on GPUs.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        if size() == 1 or (not self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, var, count = _Normalize.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.running_mean is not None and self.running_var is not None:
            assert self.num_batches_tracked is not None
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                factor = (
                    1.0 / float(self.num_batches_tracked)
                    if self.momentum is None
                    else self.momentum
                )
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
                self.running_var.lerp_(
                    (var * count / (count - 1)).to(self.running_var.dtype), factor
                )
        result: Tensor = output
        return result


class _Normalize(torch.autograd.Function):
    """The normalized input; then the statistics, which have no gradient: mean, biased variance,
    samples a channel.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = input.to(_wide(input))
        mean, var, count = _statistics(wide)
        inverse = (var + eps).rsqrt()
        output = (wide - _by_channel(mean, input)) * _by_channel(inverse, input)
        if weight is not None:
            output = output * _by_channel(weight.to(output.dtype), input)
        if bias is not None:
            output = output + _by_channel(bias.to(output.dtype), input)
        ctx.save_for_backward(input, weight, mean, inverse, count)
        ctx.mark_non_differentiable(mean, var, count)
        return output.to(input.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        input, weight, mean, inverse, count = ctx.saved_tensors
        wide_grad = grad.to(_wide(input))
        normalized = (input.to(_wide(input)) - _by_channel(mean, input)) * _by_channel(
            inverse, input
        )
        # of this rank, as any parameter's
        bias_grad, weight_grad = _sums(wide_grad), _sums(wide_grad * normalized)
        input_grad = None
        if ctx.needs_input_grad[0]:
            everyones = _all_reduced(torch.stack([bias_grad, weight_grad])) / count
            scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
            centred = (
                wide_grad
                - _by_channel(everyones[0], input)
                - normalized * _by_channel(everyones[1], input)
            )
            input_grad = (centred * _by_channel(scale, input)).to(input.dtype)
        if weight is None:
            return input_grad, None, None, None
        return input_grad, weight_grad.to(weight.dtype), bias_grad.to(weight.dtype), None


def _statistics(wide: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and biased variance of each channel over all ranks, and how many values that is.

    Ranks send deviations from their own mean: squares of the values would cancel.
    """
    own_count = wide.numel() // wide.shape[1]
    own_mean = _sums(wide) / max(own_count, 1)
    deviation = _sums((wide - _by_channel(own_mean, wide)).square())
    row = torch.stack([own_mean, deviation, torch.full_like(own_mean, own_count)])
    rows = synchronize(
        start("allgather", [row[None]], _named("statistics", row), global_process_set)
    )
    means, deviations, counts = rows.unbind(1)
    total = counts[:, 0].sum()
    if total < 2:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got {int(total)} on all ranks "
            "together."
        )
    mean = (means * counts).sum(0) / total
    var = (deviations + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


def _all_reduced(sums: Tensor) -> Tensor:
    handle = start_reduction(
        "allreduce", [sums], _named("sums", sums), Sum, 1.0, 1.0, global_process_set
    )
    result: Tensor = synchronize(handle)
    return result


def _named(what: str, tensor: Tensor) -> str:
    """Layers of one width share a name, one after the other: it is told by number then."""
    return f"sync_batch_norm.{what}.{tensor.shape[-1]}.{tensor.dtype}"


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _sums(tensor: Tensor) -> Tensor:
    """Over all dimensions but the channels'."""
    return tensor.sum([dim for dim in range(tensor.dim()) if dim != 1])


def _by_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
