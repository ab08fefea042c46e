"""Parameters in flat buckets: each rank steps its shard of a bucket, and an all-gather completes
the bucket.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn import Parameter
from torch.utils._python_dispatch import _disable_current_modes

from lightning_ring.algorithms.sharded.memory import is_held_elsewhere, num_holders
from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.memory import (
    current_stream,
    make_unreadable,
    order_after_current,
    unreadable_like,
)
from lightning_ring.gradients.reducer import Reducer

_TOO_EARLY = (
    "{} was read before its new values had arrived from the ranks that stepped them. Under "
    "strategy='ring_sharded' they arrive while the next forward runs: a module waits for its own "
    "parameters when it is called. Before other code reads or changes a parameter, call "
    "wait_parameters() of the strategy (self.trainer.strategy, fabric.strategy), or of what "
    "distribute(...) returned. Or use strategy='ring'."
)
_FORKED = (
    "{} was read in a forked process. Under strategy='ring_sharded' the ranks go on changing its "
    "memory. Before the fork call wait_parameters(), and copy what the process needs "
    "(copy.deepcopy(module), or clones of the values in module.state_dict())."
)


@dataclass(slots=True, eq=False)
class ParameterShard:
    """This rank's part of one parameter, in memory order. It may be empty."""

    param: Parameter
    offset: int  # where the parameter begins in its bucket, in elements
    strides: tuple[int, ...]  # of the parameter there
    first: int  # where the part begins within the parameter, in elements
    numel: int  # of the part
    weight: Parameter  # the part, 1-D: the optimizer steps it

    def full(self, flat: Tensor) -> Tensor:
        """View of the full parameter in ``flat``, a buffer with the layout of its bucket."""
        return flat.as_strided(self.param.size(), self.strides, flat.storage_offset() + self.offset)

    def part(self, flat: Tensor) -> Tensor:
        start = self.offset + self.first
        return flat[start : start + self.numel]


class ParameterBucket:
    """The parameters of one gradient bucket, in a flat buffer with the same layout.

    A parameter whose memory is shared (``alias = param.data``) stays in that memory, so that the
    alias gets the new values. The bucket then contains a copy, of which the optimizer steps this
    rank's part.
    """

    def __init__(self, bucket: Bucket, comm: Communicator, reducer: Reducer) -> None:
        like = bucket.flat
        self.name = bucket.describe()
        self.numel, self.device = like.numel(), like.device
        self.flat = comm.empty(like.numel(), like.dtype, like.device).zero_()
        self.shards: list[ParameterShard] = []
        # memory of the parameters that stay outside
        self._shared_memory: dict[ParameterShard, Tensor] = {}
        # of each parameter its place in the bucket, and what replaces that before it has arrived
        self._places: list[tuple[ParameterShard, Tensor, Tensor]] = []
        self.hidden = False  # until it has arrived
        # parameters get a storage of their own over this memory: collectives hold aliases of `flat`
        shown = torch.from_dlpack(self.flat)
        self._storage = shown.untyped_storage()
        for name, param, view in zip(bucket.names, bucket.params, bucket.views, strict=True):
            _, start, stop = reducer.shards.bounds(param)
            offset = int(view.storage_offset() - like.storage_offset())
            weight = Parameter(self.flat[start:stop])
            shard = ParameterShard(
                param, offset, view.stride(), start - offset, stop - start, weight
            )
            place = shard.full(shown)
            self.shards.append(shard)
            self._places.append((shard, place, unreadable_like(place, _TOO_EARLY.format(name))))
        del shown
        self._holders_while_hidden = num_holders(self._storage)
        self._names = list(bucket.names)
        self.move_in()

    @torch.no_grad()
    def move_in(self) -> None:
        """Move the parameters into the bucket; again, after other code has moved one
        (``param.data = ...``).
        """
        if self.hidden:
            return
        self._shared_memory.clear()
        for shard, place, _ in self._places:
            param = shard.param
            # comparisons that launch nothing, not even through torch's dispatcher: every parameter
            # takes them at every step
            lies_there = param.data_ptr() == place.data_ptr() and param.shape == place.shape
            if not param.numel() or (lies_there and param.stride() == place.stride()):
                continue
            inside = self._contains(param)  # ``param.data = param.data.t()``
            stays = not inside and is_held_elsewhere(param)
            place.copy_(param.clone() if inside else param)
            if stays:
                self._shared_memory[shard] = param.data
            else:
                param.data = place

    def hide(self) -> bool:
        """Until `arrive`, reading a parameter is an error, unless the memory of one is shared.
        Returns whether it is. An alias of the bucket's memory stays readable.
        """
        if not self.hidden and not self._shared_memory:
            with torch._C.DisableTorchFunction():  # these are no reads
                for shard, _, unreadable in self._places:
                    shard.param.data = unreadable
            self.hidden = True
        return self.hidden

    @property
    def has_aliases(self) -> bool:
        """Whether other code holds memory of a hidden parameter, as after ``array =
        param.numpy()``.
        """
        return num_holders(self._storage) != self._holders_while_hidden

    @torch.no_grad()
    def arrive(self) -> None:
        """The all-gather has finished: make the parameters readable. What other code has put in
        place of one (``param.data = ...``) stays there, until `move_in`.
        """
        with torch._C.DisableTorchFunction():
            for shard, place, unreadable in self._places if self.hidden else ():
                if _storage(shard.param) == _storage(unreadable):
                    shard.param.data = place
            self.hidden = False
            for shard, home in self._shared_memory.items():
                home.copy_(shard.full(self.flat))

    def _contains(self, param: Parameter) -> bool:
        return _storage(param) == self._storage._cdata

    @torch.no_grad()
    def keep_weights(self) -> None:
        """After a step: copy new values of weights that the optimizer has moved elsewhere
        (``weight.data = ...``).
        """
        begin, size = self.flat.data_ptr(), self.flat.element_size()
        for shard in self.shards:
            place = begin + size * (shard.offset + shard.first)
            if shard.numel and shard.weight.data_ptr() != place:
                part = shard.part(self.flat)
                part.copy_(shard.weight)
                shard.weight.data = part

    def refuse_reads(self) -> None:
        """In a forked process: reading a parameter is an error from now on."""
        for name, (shard, _, unreadable) in zip(self._names, self._places, strict=True):
            make_unreadable(unreadable, _FORKED.format(name))
            if shard not in self._shared_memory:
                shard.param.data = unreadable

    @torch.no_grad()
    def move_out(self) -> None:
        """Give parameters memory of their own again, unless other code holds the bucket's. Only
        the description of the layout remains.
        """
        self.arrive()
        inside = [self._contains(shard.param) for shard in self.shards]
        held = num_holders(self._storage) > self._holders_while_hidden + sum(inside)
        for shard, is_inside in zip(self.shards, inside, strict=True):
            if is_inside and not held:
                shard.param.data = shard.param.data.clone(memory_format=torch.preserve_format)
            shard.weight.data = self.flat.new_empty(0)
        self._places.clear()
        self._shared_memory.clear()
        self.flat = self.flat.new_empty(0)
        self._storage = self.flat.untyped_storage()


class ShardedParameters:
    """All parameter buckets of a model, and the unfinished all-gathers."""

    def __init__(self, comm: Communicator, reducer: Reducer) -> None:
        self.comm = comm
        self.reducer = reducer
        self.buckets: list[ParameterBucket] = []
        # this rank's, of each parameter in a bucket
        self.by_param: dict[Parameter, ParameterShard] = {}
        self._bucket_of: dict[int, ParameterBucket] = {}
        self._gathers: dict[ParameterBucket, Work] = {}
        self._reader = (os.getpid(), threading.get_ident())
        self._arriving = threading.RLock()
        self._stepped_on: Any = None  # the stream
        # an optimizer whose step has begun and not ended, and the thread of the step
        self._stepping: tuple[str, int] | None = None
        _open.add(self)

    def follow(self) -> None:
        """Create a parameter bucket for each new gradient bucket. Collective."""
        self.reducer.settle()
        for gradients in self.reducer.buckets[len(self.buckets) :]:
            new = ParameterBucket(gradients, self.comm, self.reducer)
            self.buckets.append(new)
            for shard in new.shards:
                self.by_param[shard.param] = shard
                self._bucket_of[id(shard.param)] = new
        for bucket in self.buckets:
            bucket.move_in()

    def own_gradient(self, param: Parameter) -> Tensor | None:
        """This rank's part of ``param.grad``, 1-D, to be changed in place."""
        return self.reducer.shards.of_gradient(param)

    def gather(self, params: Iterable[Parameter]) -> None:
        """Start the all-gathers of the buckets of ``params``, in the order of use in the next
        forward.
        """
        params = list(params)
        if not params:
            return
        # as after any optimizer's step, backward through an older graph is then an error
        for param in params:
            torch.autograd.graph.increment_version(param)
        self._stepped_on = current_stream(self.device)
        changed = {self._bucket_of[id(param)] for param in params}
        for number, bucket in reversed(list(enumerate(self.buckets))):
            if bucket in changed:
                bucket.keep_weights()
                name = f"parameters of bucket {number} ({bucket.name})"
                self._gathers[bucket] = self.comm.all_gather_(bucket.flat, name=name)

    @property
    def complete(self) -> bool:
        return not self._gathers and self._stepping is None

    @property
    def hidden(self) -> bool:
        """Whether reading some parameter is an error."""
        return any(bucket.hidden for bucket in self.buckets)

    @property
    def device(self) -> torch.device:
        return self.reducer.buckets[0].flat.device

    def wait_for(self, param: Parameter) -> None:
        self.check_step()
        bucket = self._bucket_of.get(id(param))
        # A wait in another thread could overtake one of this thread. One in a forked child would
        # answer the other ranks.
        here = (os.getpid(), threading.get_ident()) == self._reader
        if bucket is not None and bucket in self._gathers and here:
            self._wait_for(bucket)

    def hide(self) -> None:
        """Until its bucket has arrived, reading a parameter is an error."""
        for bucket in list(self._gathers):
            if not bucket.hide() or bucket.has_aliases:  # an alias cannot be hidden
                self._wait_for(bucket)

    def show(self) -> None:
        """After an exception: make all parameters readable with their current values; new ones
        may never arrive.
        """
        self._stepping = None
        for bucket in self.buckets:
            bucket.arrive()

    def wait(self) -> None:
        self.check_step()
        if self._gathers and os.getpid() != self._reader[0]:
            raise RingError(_FORKED.format("a parameter"))
        while gathers := list(self._gathers):
            self._wait_for(gathers[0])

    def begin_step(self, optimizer: str) -> None:
        """From now on an optimizer changes this rank's parts, and reading a parameter is an
        error.
        """
        self._stepping = optimizer, threading.get_ident()
        for bucket in self.buckets:
            bucket.hide()

    def end_step(self, changed: Iterable[Parameter]) -> None:
        """Start the all-gathers of the parameters that the step has changed."""
        self._stepping = None
        self.gather(changed)
        for bucket in self.buckets:
            if bucket.hidden and bucket not in self._gathers:
                bucket.arrive()

    @property
    def is_stepping(self) -> bool:
        """Whether a step of this thread has begun and not ended, as after an exception."""
        return self._stepping is not None and self._stepping[1] == threading.get_ident()

    def check_step(self) -> None:
        if self._stepping is not None and self.is_stepping:
            raise RingError(
                f"the last step of {self._stepping[0]} did not end on this rank: it raised an "
                "exception, reads parameters itself, or calls its closure again. Under "
                "strategy='ring_sharded' each rank steps its part of the parameters, and these "
                "parts were not exchanged: the weights mix those before and after the step. After "
                "an exception go on from a checkpoint, in a new training. Such an optimizer works "
                "with strategy='ring'."
            )

    def take_what_arrives(self, seconds: float) -> bool:
        """After an exception, which some ranks may not have met: wait no longer than that.
        Whether all have arrived.
        """
        until = time.monotonic() + seconds
        try:
            for bucket, work in list(self._gathers.items()):
                while not work.done() and time.monotonic() < until:
                    time.sleep(0.001)
                if work.done():
                    self._wait_for(bucket)
        except RingError:
            pass
        return self.complete

    def forget_gathers(self) -> None:
        """Of ranks that have gone: the values come in another way."""
        self._gathers.clear()

    def _wait_for(self, bucket: ParameterBucket) -> None:
        # neither `torch.func` nor a mode takes part in computations of the wait
        with (
            torch._C.DisableTorchFunction(),
            temporarily_clear_interpreter_stack(),
            _disable_current_modes(),
        ):
            if (work := self._gathers.get(bucket)) is None:
                return
            work.wait()
            with self._arriving:
                # another thread may have waited for this all-gather, and started the next one
                if self._gathers.get(bucket) is not work:
                    return
                # removed after the wait, so that an interrupted wait is repeated
                del self._gathers[bucket]
                bucket.arrive()
                # another stream that reads waits, as after any optimizer's step, for the stream
                # that stepped
                order_after_current(self._stepped_on, bucket.device)

    def release(self) -> None:
        """Give parameters memory of their own, and drop the buckets' flat memory."""
        _open.discard(self)
        with torch._C.DisableTorchFunction():
            for bucket in self.buckets:
                bucket.move_out()


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


_open: WeakSet[ShardedParameters] = WeakSet()  # of trainings that have not ended


def _refuse_reads() -> None:
    with torch._C.DisableTorchFunction():
        for parameters in list(_open):
            for bucket in parameters.buckets:
                if bucket.flat.is_cpu:  # a forked process cannot read a GPU's memory anyway
                    bucket.refuse_reads()


os.register_at_fork(after_in_child=_refuse_reads)
