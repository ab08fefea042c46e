"""This rank's shard of each bucket, and its part of each gradient."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator, shard_bounds
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.layout import BucketLayout
from lightning_ring.gradients.sharded_gradient import GradientPart, ShardedGradient


class GradientShards:
    """The shard of a bucket is `shard_bounds` of ``bucket.flat`` for ``comm.shard_index``.

    Of use once the layout is final.
    """

    def __init__(self, layout: BucketLayout, comm: Communicator) -> None:
        self._layout = layout
        self.comm = comm
        self._parts: dict[Parameter, GradientPart] = {}
        # of the pieces of its shard: a gap and a part in turn
        self._sizes: dict[Bucket, list[int]] = {}

    def bounds(self, param: Parameter, shard_index: int | None = None) -> tuple[Bucket, int, int]:
        """The bucket of ``param``, and begin and end of a rank's part in its ``flat``; the part may
        be empty.

        This rank's, unless another ``shard_index`` is given.
        """
        bucket, slot = self._layout.slots[param]
        first, last = self._shard(bucket, shard_index)
        offset = int(bucket.views[slot].storage_offset() - bucket.flat.storage_offset())
        start = min(max(first, offset), offset + param.numel())
        return bucket, start, max(start, min(last, offset + param.numel()))

    def part(self, param: Parameter) -> GradientPart:
        """Which elements of the gradient of ``param`` are this rank's."""
        if (part := self._parts.get(param)) is None:
            bucket, start, stop = self.bounds(param)
            _, slot = self._layout.slots[param]
            view = bucket.views[slot]
            first = start - int(view.storage_offset() - bucket.flat.storage_offset())
            part = GradientPart(bucket.names[slot], view, first, stop - start, self.comm)
            self._parts[param] = part
        return part

    def averages(self, bucket: Bucket) -> dict[Parameter, Tensor]:
        """This rank's parts of the gradients in ``bucket``, 1-D, as memory that other code may
        hold.
        """
        if (sizes := self._sizes.get(bucket)) is None:
            first, last = self._shard(bucket)
            bounds = [edge for param in bucket.params for edge in self.bounds(param)[1:]]
            edges = [first, *(min(max(edge, first), last) for edge in bounds), last]
            self._sizes[bucket] = sizes = [stop - start for start, stop in pairwise(edges)]
        return dict(
            zip(bucket.params, bucket.lend(*self._shard(bucket)).split(sizes)[1::2], strict=True)
        )

    def of_gradient(self, param: Parameter) -> Tensor | None:
        """This rank's part of ``param.grad`` in the order of memory, 1-D, to be changed in
        place.
        """
        grad, part = param.grad, self.part(param)
        if grad is None:
            return None
        if isinstance(grad, ShardedGradient):
            return grad.own(part)
        whole = part.laid_out(grad)  # other code has set it
        if whole is not grad:
            param.grad = whole
        return part.of(whole.detach())

    def _shard(self, bucket: Bucket, shard_index: int | None = None) -> tuple[int, int]:
        index = self.comm.shard_index if shard_index is None else shard_index
        return shard_bounds(bucket.flat.numel(), self.comm.world_size, index)
