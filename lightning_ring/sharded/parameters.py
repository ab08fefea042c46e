"""Parameters in flat buckets: each rank changes its shard of a bucket, and an all-gather makes it whole again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.shards import ShardReducer


@dataclass(slots=True, eq=False)
class Piece:
    """This rank's part of one parameter, in the order of memory; it may be empty.

    Attributes:
        offset: Where the parameter begins in its bucket, in elements.
        strides: The parameter's strides there.
        first: Where the part begins within the parameter, in elements.
        numel: How long the part is.
        weight: The part, 1-D: what an optimizer steps.
    """

    param: Parameter
    offset: int
    strides: tuple[int, ...]
    first: int
    numel: int
    weight: Parameter

    def whole(self, flat: Tensor) -> Tensor:
        """View of the whole parameter's place in ``flat``, a buffer laid out as its bucket."""
        return flat.as_strided(self.param.size(), self.strides, flat.storage_offset() + self.offset)

    def part(self, flat: Tensor) -> Tensor:
        """View of this rank's part of it, 1-D."""
        start = self.offset + self.first
        return flat[start : start + self.numel]


class ParameterBucket:
    """The parameters of one gradient bucket, in memory laid out as that bucket is."""

    def __init__(self, bucket: Bucket, comm: Communicator, reducer: ShardReducer) -> None:
        like = bucket.flat
        self.name = bucket.describe()
        self.numel, self.device = like.numel(), like.device
        self.flat = comm.empty(like.numel(), like.dtype, like.device).zero_()
        self.pieces = []
        for param, view in zip(bucket.params, bucket.views, strict=True):
            _, start, stop = reducer.part_of(param)
            offset = int(view.storage_offset() - like.storage_offset())
            weight = Parameter(self.flat[start:stop])
            piece = Piece(param, offset, view.stride(), start - offset, stop - start, weight)
            self.pieces.append(piece)
        self.move_in()

    @torch.no_grad()
    def move_in(self) -> None:
        """Move the parameters here; again, where someone gave one other memory (``param.data = ...``)."""
        start, size = self.flat.data_ptr(), self.flat.element_size()
        for piece in self.pieces:
            if piece.param.numel() and piece.param.data_ptr() != start + piece.offset * size:
                piece.param.data = piece.whole(self.flat).copy_(piece.param)

    @torch.no_grad()
    def move_out(self) -> None:
        """Give parameters memory of their own again; what is left here describes the layout."""
        for piece in self.pieces:
            if piece.param.data_ptr() == piece.whole(self.flat).data_ptr():
                piece.param.data = piece.param.data.clone(memory_format=torch.preserve_format)
            piece.weight.data = self.flat.new_empty(0)
        self.flat = self.flat.new_empty(0)


class ShardedParameters:
    """All parameter buckets of a model, and the all-gathers that are on their way.

    Attributes:
        by_param: The piece of each parameter that lies in a bucket.
    """

    def __init__(self, comm: Communicator, reducer: ShardReducer) -> None:
        self.comm = comm
        self.reducer = reducer
        self.buckets: list[ParameterBucket] = []
        self.by_param: dict[Parameter, Piece] = {}
        self._bucket_of: dict[int, ParameterBucket] = {}
        self._coming: dict[ParameterBucket, Work] = {}

    def follow(self) -> None:
        """Lay out the buckets that the reducer has and this has not yet. Collective."""
        self.reducer.settle()
        if not self.reducer.settled:
            return
        for gradients in self.reducer.buckets[len(self.buckets) :]:
            new = ParameterBucket(gradients, self.comm, self.reducer)
            self.buckets.append(new)
            for piece in new.pieces:
                self.by_param[piece.param] = piece
                self._bucket_of[id(piece.param)] = new
        for bucket in self.buckets:
            bucket.move_in()

    def own_gradient(self, param: Parameter) -> Tensor | None:
        """This rank's part of ``param.grad``, 1-D, to be changed in place."""
        return self.reducer.own_part(param)

    def gather(self, params: Iterable[Parameter]) -> None:
        """Start to make the buckets of ``params`` whole, in the order in which the next forward uses them."""
        params = list(params)
        # an optimizer that steps whole ones leaves this mark too: a graph made before the step is then an error
        for param in params:
            torch.autograd.graph.increment_version(param)
        changed = {self._bucket_of[id(param)] for param in params}
        for number, bucket in reversed(list(enumerate(self.buckets))):
            if bucket in changed:
                name = f"parameters of bucket {number} ({bucket.name})"
                self._coming[bucket] = self.comm.all_gather_(bucket.flat, name=name)

    @property
    def whole(self) -> bool:
        return not self._coming

    @property
    def device(self) -> torch.device:
        """Where vectors that all ranks sum belong."""
        return self.reducer.buckets[0].flat.device

    def is_coming(self, param_id: int) -> bool:
        return self._bucket_of.get(param_id) in self._coming

    def wait_for(self, param_id: int) -> None:
        """Return when the parameter with this ``id`` is whole."""
        bucket = self._bucket_of.get(param_id)
        if bucket is not None and bucket in self._coming:
            self._coming.pop(bucket).wait()

    def wait(self) -> None:
        """Return when all parameters are whole."""
        while self._coming:
            bucket = next(iter(self._coming))
            self._coming[bucket].wait()
            self._coming.pop(bucket, None)  # now, and not before: whoever is interrupted while waiting asks again

    def release(self) -> None:
        """Give parameters memory of their own, and drop the buckets' flat memory."""
        for bucket in self.buckets:
            bucket.move_out()
