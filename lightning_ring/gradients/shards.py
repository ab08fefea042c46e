"""This rank's shard of each bucket, and its part of each gradient."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator, shard_bounds
from lightning_ring.gradients.bucket import Bucket, same_memory
from lightning_ring.gradients.layout import BucketLayout


class GradientShards:
    """The shard of a bucket is `shard_bounds` of ``bucket.flat`` for ``comm.shard_index``."""

    def __init__(self, layout: BucketLayout, comm: Communicator) -> None:
        self._layout = layout
        self.comm = comm

    def slot(self, param: Parameter) -> tuple[Bucket, int]:
        return self._layout.slots[param]

    def bounds(self, param: Parameter, shard_index: int | None = None) -> tuple[Bucket, int, int]:
        """The bucket of ``param``, and begin and end of a rank's part in its ``flat``; the part may be empty.

        This rank's, unless another ``shard_index`` is given.
        """
        bucket, slot = self.slot(param)
        first, last = self._shard_bounds(bucket, shard_index)
        offset = int(bucket.views[slot].storage_offset() - bucket.flat.storage_offset())
        start = min(max(first, offset), offset + param.numel())
        return bucket, start, max(start, min(last, offset + param.numel()))

    def of_gradient(self, param: Parameter) -> Tensor | None:
        """This rank's part of ``param.grad`` in the order of memory, 1-D, to be changed in place."""
        grad = param.grad
        if grad is None:
            return None
        bucket, start, stop = self.bounds(param)
        view = self.view(param)
        if grad.is_sparse or grad.stride() != view.stride():  # the user has set it
            param.grad = grad = torch.empty_like(view).copy_(grad.to_dense() if grad.is_sparse else grad)
        first = start - int(view.storage_offset() - bucket.flat.storage_offset())
        grad = grad.detach() if grad.requires_grad else grad
        return grad.as_strided((stop - start,), (1,), int(grad.storage_offset()) + first)

    def view(self, param: Parameter) -> Tensor:
        bucket, index = self.slot(param)
        return bucket.views[index]

    def is_view(self, param: Parameter) -> bool:
        return param.grad is not None and same_memory(param.grad, self.view(param))

    def zero_other_parts(self, param: Parameter) -> Tensor:
        """Set ``param.grad`` to zero outside this rank's part, and return a copy of that part."""
        own, grad = self.of_gradient(param), param.grad
        assert own is not None
        assert grad is not None
        flat = grad.detach().as_strided((grad.numel(),), (1,), int(grad.storage_offset()))
        first = int(own.storage_offset() - grad.storage_offset())
        flat[:first].zero_()
        flat[first + own.numel() :].zero_()
        return own.clone()

    def mark_other_shards(self, bucket: Bucket) -> None:
        """Set the gradients outside this rank's shard to NaN: reduce-scatter leaves partial sums there."""
        flat = bucket.flat
        first, last = self._shard_bounds(bucket)
        end = flat.numel() - bucket.num_flags
        flat[: min(first, end)].fill_(math.nan)
        flat[last:end].fill_(math.nan)

    def _shard_bounds(self, bucket: Bucket, shard_index: int | None = None) -> tuple[int, int]:
        index = self.comm.shard_index if shard_index is None else shard_index
        return shard_bounds(bucket.flat.numel(), self.comm.world_size, index)
