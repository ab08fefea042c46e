"""`SyncBatchNorm`: batch statistics over the samples of all ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ring.horovod.collectives import Sum
from lightning_ring.horovod.context import size
from lightning_ring.horovod.operations import allreduce


class SyncBatchNorm(_BatchNorm):
    """BatchNorm with statistics over all ranks' samples, whose numbers may differ.

    In evaluation the running statistics are used.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        if size() == 1 or (not self.training and self.track_running_stats):
            return super().forward(input)
        self._check_input_dim(input)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        by_channel = (1, -1, *[1] * (input.dim() - 2))
        others = [dim for dim in range(input.dim()) if dim != 1]
        counts = torch.full_like(wide[:1].sum(others), wide.numel() // wide.shape[1])
        sums, counts = _summed("values", torch.stack([wide.sum(others), counts]))
        count = counts[0].detach()
        if count < 2:
            raise ValueError(
                "Expected more than 1 value per channel when training, got "
                f"{int(count)} on all ranks together."
            )
        mean = sums / count
        # a sum of squares of the values themselves would cancel
        centred = wide - mean.view(by_channel)
        var = _summed("squares", centred.square().sum(others)) / count
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), var.detach() * count / (count - 1))
        output = centred * (var + self.eps).rsqrt().view(by_channel)
        if self.affine:
            weight, bias = (
                param.to(wide.dtype).view(by_channel) for param in (self.weight, self.bias)
            )
            output = output * weight + bias
        return output.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor) -> None:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum
        if factor is None:
            factor = 1.0 / float(self.num_batches_tracked)
        for running, new in ((self.running_mean, mean), (self.running_var, var)):
            assert running is not None
            running.lerp_(new.to(running.dtype), factor)


def _summed(what: str, own: Tensor) -> Tensor:
    """Layers of one width share a name: it is told by number then."""
    name = f"sync_batch_norm.{what}.{own.shape[-1]}.{own.dtype}"
    return allreduce(own, name=name, op=Sum)
