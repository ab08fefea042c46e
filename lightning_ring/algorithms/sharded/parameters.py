"""Parameters in flat buckets: each rank changes its shard of a bucket, and an all-gather makes it whole again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import Parameter

from lightning_ring.algorithms.sharded.memory import is_held_elsewhere, num_holders, unreadable_like
from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.shard_reducer import ShardReducer

_TOO_EARLY = (
    "{} was read before its new values had arrived from the ranks that stepped them, by code that lightning_ring does "
    "not see reading (scripted or compiled code, a thread, C++). Call self.trainer.strategy.wait_parameters() before "
    "that, or use strategy='ring'."
)


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
    """The parameters of one gradient bucket, in memory laid out as that bucket is.

    A parameter whose memory others hold too (``alias = param.data``) stays there, so that they see its new values: its
    place in the bucket then holds a copy, of which this rank's part is stepped.
    """

    def __init__(self, bucket: Bucket, comm: Communicator, reducer: ShardReducer) -> None:
        like = bucket.flat
        self.name = bucket.describe()
        self.numel, self.device = like.numel(), like.device
        self.flat = comm.empty(like.numel(), like.dtype, like.device).zero_()
        self.pieces: list[Piece] = []
        self._home: dict[Piece, Tensor] = {}  # memory that others hold too, of the parameters that stay in it
        self._places: list[Tensor] = []
        self._hidden = False
        self._unreadable: list[Tensor] = []
        # parameters get a storage of their own over this memory: collectives hold aliases of `flat`
        shown = torch.from_dlpack(self.flat)
        self._storage = shown.untyped_storage()
        for param, view in zip(bucket.params, bucket.views, strict=True):
            _, start, stop = reducer.part_of(param)
            offset = int(view.storage_offset() - like.storage_offset())
            weight = Parameter(self.flat[start:stop])
            piece = Piece(param, offset, view.stride(), start - offset, stop - start, weight)
            self.pieces.append(piece)
            self._places.append(piece.whole(shown))
        del shown
        self._holders_while_hidden = num_holders(self._storage)
        messages = [_TOO_EARLY.format(name) for name in bucket.names]
        self._unreadable = [unreadable_like(*pair) for pair in zip(self._places, messages, strict=True)]
        self.move_in()

    @torch.no_grad()
    def move_in(self) -> None:
        """Move the parameters here; again, where someone gave one other memory (``param.data = ...``)."""
        if self._hidden:
            return
        self._home.clear()
        for piece, place in zip(self.pieces, self._places, strict=True):
            param = piece.param
            if not param.numel() or param.data_ptr() == place.data_ptr():
                continue
            stays = is_held_elsewhere(param)
            place.copy_(param)
            if stays:
                self._home[piece] = param.data
            else:
                param.data = place

    def holds(self, address: int) -> bool:
        start = self.flat.data_ptr()
        return start <= address < start + self.flat.nbytes

    @property
    def can_be_hidden(self) -> bool:
        return not self._home

    def hide(self) -> None:
        """Until `arrive`, reading one of the parameters is an error; an alias of its memory can still be read."""
        for piece, unreadable in zip(self.pieces, self._unreadable, strict=True):
            piece.param.data = unreadable
        self._hidden = True

    @property
    def has_aliases(self) -> bool:
        """Whether something outside has the memory of a parameter that is hidden: ``array = param.numpy()``, say."""
        return num_holders(self._storage) != self._holders_while_hidden

    @torch.no_grad()
    def arrive(self) -> None:
        """All ranks' parts are here."""
        if self._hidden:
            for piece, place in zip(self.pieces, self._places, strict=True):
                piece.param.data = place
            self._hidden = False
        for piece, home in self._home.items():
            home.copy_(piece.whole(self.flat))

    @torch.no_grad()
    def move_out(self) -> None:
        """Give parameters memory of their own again; what is left here describes the layout."""
        for piece, place in zip(self.pieces, self._places, strict=True):
            if self._hidden or piece.param.data_ptr() == place.data_ptr():
                piece.param.data = place.clone(memory_format=torch.preserve_format)
            piece.weight.data = self.flat.new_empty(0)
        self._hidden = False
        self._places.clear()
        self._unreadable.clear()
        self._home.clear()
        self.flat = self.flat.new_empty(0)
        self._storage = self.flat.untyped_storage()


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

    def wait_for(self, param_id: int) -> None:
        """Return when the parameter with this ``id`` is whole."""
        bucket = self._bucket_of.get(param_id)
        if bucket is not None and bucket in self._coming:
            self._wait_for(bucket)

    def wait_for_memory(self, tensor: Tensor) -> None:
        """Return when the memory of ``tensor``, no parameter, is whole: that of ``alias = param.data``, for instance.

        A tensor without memory of its own, such as those of `torch.func`, may have any parameter inside.
        """
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            self.wait()
            return
        for bucket in list(self._coming):
            if bucket.holds(address):
                self._wait_for(bucket)
                return

    def hide(self) -> None:
        """Reading what has not arrived is an error from now on, unless it is waited for."""
        with torch._C.DisableTorchFunction():  # in manual optimization `ParameterReads` would take it for a read
            for bucket in list(self._coming):
                if bucket.can_be_hidden:
                    bucket.hide()
                if not bucket.can_be_hidden or bucket.has_aliases:
                    self._wait_for(bucket)  # an alias cannot be hidden

    def show(self) -> None:
        """Make all parameters readable as they are, after an exception: some values may never arrive."""
        for bucket in self._coming:
            bucket.arrive()

    def wait(self) -> None:
        """Return when all parameters are whole."""
        while self._coming:
            self._wait_for(next(iter(self._coming)))

    def _wait_for(self, bucket: ParameterBucket) -> None:
        # `torch.func`, and modes such as that of `ParameterReads`, would take part in what waiting computes
        with torch._C.DisableTorchFunction(), temporarily_clear_interpreter_stack():
            self._coming[bucket].wait()
            # taken out after the wait: an interrupted one is asked for again
            if self._coming.pop(bucket, None) is not None:
                bucket.arrive()

    def release(self) -> None:
        """Give parameters memory of their own, and drop the buckets' flat memory."""
        for bucket in self.buckets:
            bucket.move_out()
