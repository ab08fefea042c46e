"""Averages gradients over the ranks while backward runs.

**The first backward** sends nothing before its end. It shows whether gradients come in several
parts, as those of a module do that is used twice under reentrant checkpointing. If one rank saw
that, all ranks give up overlap.

**Hooks registered after ours.** In the first backward in which one runs, the buckets are sent at
the end. From then on our hook runs last, so that changes of the user's hook are sent. If backward
accumulates into a gradient that was sent already, the late part is sent a second time.

**Several modules in one backward** have a reducer each, over one communicator. They take turns in
the order in which backward reaches them (`Turns`): a bucket that waits for a parameter which only
some ranks use would otherwise be sent before another module's buckets on some ranks, and after them
on others.

**Names.** A collective is named by the number of the reduced backward and of the optimizer steps
before it. One backward or step more on a rank is therefore a `CollectiveError` on every rank. NCCL
exchanges no headers: with ``RING_CHECK_COLLECTIVES=1`` the ranks compare names over the hosts.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator, Work, advance
from lightning_ring.comm.cost import DEFAULT_CAP_MB
from lightning_ring.comm.host_copy import HostCopy
from lightning_ring.comm.recording import unrecorded
from lightning_ring.comm.waiting import nothing
from lightning_ring.errors import RingError
from lightning_ring.gradients.backward import (
    BackwardPasses,
    GradientHooks,
    GradientParts,
    UnreducedGradients,
)
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.delivery import (
    Delivery,
    ShardedAverages,
    WholeAverages,
    prepare_compressed,
)
from lightning_ring.gradients.layout import BucketLayout
from lightning_ring.gradients.sharded_gradient import GradientShards
from lightning_ring.gradients.sparse import SparseGradients

log = logging.getLogger(__name__)


class Reducer:
    """Averages parameters' gradients over the ranks of ``comm``, bucket by bucket, overlapping
    backward.

    A bucket is sent when its gradients are complete and every bucket before it was sent. `finish`
    sends the rest, waits, and puts the averages into ``param.grad``. `backward` calls it; for a
    plain ``loss.backward()`` inside ``plain_backwards(reduced=True)`` the autograd engine does.

    Buckets are sent in one order on every rank, the reverse of use (`BucketLayout`). If some ranks
    used a parameter, the others contribute zeros; if none did, it keeps its ``.grad``. Sparse
    gradients are averaged in `finish`, outside the buckets (`SparseGradients`). The name of each
    collective contains the number of its backward and of the optimizer's step, so that ranks with
    different counts get an error.

    After a backward that raised, what it has sent is dropped, and so must be what it left in
    ``param.grad``: until ``zero_grad()`` the next backward or step is an error.

    Args:
        named_parameters: Name and parameter, in order of registration. Shared parameters may
            repeat.
        bucket_cap_mb: Size in MiB past which a bucket takes no further parameter.
        compressor: Sends the buckets whose dtype it accepts; `None` sends all in their own dtype.
        shards: Leave each rank only its part of an average (`ShardedAverages`). The layout is final
            after the first backward, and contains all parameters.
        gathers_sparse: Average sparse gradients as such; else they are made dense.
        warn: Called with a message for the user, at most once a message.
        sparse_weights: Returns the parameters that declare sparse gradients.
        before_backward: Called before the reduction of each backward.
    """

    def __init__(
        self,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
        compressor: Compressor | None = None,
        shards: bool = False,
        gathers_sparse: bool = True,
        warn: Callable[[str], None] = log.warning,
        sparse_weights: Callable[[], set[Parameter]] = set,
        before_backward: Callable[[], None] = nothing,
    ) -> None:
        # set to ask all ranks to stop: the next backward sends the request
        self.stop_requested = False
        self.active_ranks: int | None = None  # that the sum is divided by; None: all
        self.num_finished = 0  # backward passes reduced so far
        self.num_raised = 0  # backward passes that were begun and raised an exception
        self.num_steps = 0  # of optimizers so far, counted by the caller
        self.gathers_sparse = gathers_sparse and not shards
        # called with each parameter that got a gradient
        self.on_gradient: Callable[[Parameter], None] | None = None
        self._comm = comm
        self._before_backward = before_backward
        self._warn_once = functools.cache(warn)
        self._compressor = compressor
        self.layout = BucketLayout(comm, bucket_cap_mb, self._prepare_to_send, self._forget_buckets)
        self.shards = GradientShards(self.layout, comm)
        self.sharded = shards
        self._delivery: Delivery = (
            ShardedAverages(comm, compressor, self.shards)
            if shards
            else WholeAverages(comm, compressor)
        )
        self._passes = BackwardPasses(self._begin, self.finish, self._abandon)
        self._hooks = GradientHooks(self._take_gradient)
        self._unreduced = UnreducedGradients()
        self._parts = GradientParts(self._warn_once)
        self._sparse = SparseGradients(comm, sparse_weights, enabled=self.gathers_sparse)
        self._produced_sparse: set[Parameter] = set()  # by this backward, outside the buckets
        # of the last backward passes
        self._stop_flags: deque[HostCopy] = deque(maxlen=2)
        self._names: dict[Parameter, str] = {}  # of all parameters whose gradients are averaged
        self._ids: set[int] = set()  # of the same
        self._queue: list[Bucket] = []  # of this backward
        self._next = 0  # index in the queue of the next bucket to send
        self._works: list[tuple[Bucket, Work]] = []
        self._turns = turns_of(comm)
        self._revise_at_end = False  # of this backward, instead of at the begin of the next one
        self.track(named_parameters)

    @property
    def buckets(self) -> list[Bucket]:
        """In the order of sending."""
        return self.layout.buckets

    def restore(self, names: Sequence[Sequence[str]]) -> None:
        """Use the buckets of a checkpoint, if no backward has run yet. All ranks call it."""
        if not self.num_finished and not self._passes.active:
            self.layout.restore(names)

    def track(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[Parameter]:
        """Reduce the gradients of new parameters (later added or thawed) too. All ranks call it at
        the same point.

        Returns the new parameters.
        """
        new = []
        for name, param in named_parameters:
            if param not in self._names and param.requires_grad:
                self._names[param] = name
                self._ids.add(id(param))
                self._hooks.add(param)
                new.append((name, param))
        if new:
            self.layout.add(self._take_sparse(new)[::-1])
        return [param for _, param in new]

    @property
    def tracked(self) -> list[tuple[str, Parameter]]:
        """Name and parameter of everything passed to `track` so far."""
        return [(name, param) for param, name in self._names.items()]

    def is_tracked(self, param: Parameter) -> bool:
        # asked of all parameters at each backward: to hash a tensor takes longer
        return id(param) in self._ids

    # -- which backward passes are reduced

    def backward(self) -> AbstractContextManager[None]:
        """Around the outermost backward: on leaving, gradients are averaged. Nothing happens
        inside `no_sync`.
        """
        return self._passes.reduced()

    def plain_backwards(self, *, reduced: bool) -> AbstractContextManager[None]:
        """Around code whose plain ``loss.backward()`` is reduced, or stays local."""
        return self._passes.plain(reduced=reduced)

    @property
    def reduces_plain_backwards(self) -> bool:
        return self._passes.reduces

    def take_assigned(self) -> None:
        """Average every current ``param.grad`` in the next backward, reported by a hook or not."""
        self._unreduced.accumulated.update(param for param in self._names if param.grad is not None)

    def no_sync(self) -> AbstractContextManager[None]:
        """Around backwards that leave gradients local. The next backward outside sends them."""
        return self._passes.no_sync()

    def discarding(self) -> AbstractContextManager[None]:
        """Around a backward that changes no ``param.grad`` and sends nothing."""
        return self._passes.discarding(self._names)

    def finish(self) -> None:
        """Send the remaining buckets, wait for all, publish the averages. Does nothing without a
        current backward.

        A bucket that did not arrive in time is named in the error.
        """
        self._passes.note_raised()
        if self._passes.active:
            self._finish()

    def _finish(self) -> None:
        self._turns.finish_before(self)
        while self._next < len(self._queue):
            self._launch()
        fresh = {
            param
            for param in self._sparse.params
            if param in self._produced_sparse or param in self._unreduced
        }
        told_to_stop = self._sparse.average(
            fresh, self.active_ranks, stop=self.stop_requested, prefix=self._named("")
        )
        for _, work in self._works:
            advance(work)
        for _, work in self._works:
            work.wait()
        self._parts.average_late(self._queue, self._comm, self.active_ranks, self._named(""))
        self._delivery.publish(self._queue, self._named)
        self._unreduced.drop_local(self._was_sent)
        if not self.num_finished:
            self._parts.agree(self._comm)
        if self._works:
            self._keep_stop_flag(self._works[-1][0].stop)
        elif self._sparse.params:
            self._keep_stop_flag(torch.tensor([told_to_stop]))
        self._works = []
        self._unreduced.accumulated.clear()
        self._hooks.move_last()
        self._passes.active = False
        self.num_finished += 1
        if self._revise_at_end:
            self._revise_layout()
        if self.sharded:
            self.settle()

    def settle(self) -> None:
        """Make the layout final, if it is not yet. Collective."""
        if not self.layout.settled:
            self._revise_layout()
            self.layout.settle()
            self._delivery.settle(self.buckets)

    def send_zeros(self, averages: Sequence[Tensor | None] = ()) -> list[Tensor | None]:
        """Take part in a backward of the other ranks with zeros. This rank's own gradients stay.

        The other ranks may accumulate several backwards in one step, and then send the averages of
        the previous backward plus new gradients. This rank must send the same ``averages``.

        Returns:
            The averages of this backward, one per parameter, to pass to the next call.
        """
        kept = [
            (param, None if param.grad is None else param.grad.clone()) for param in self._names
        ]
        unreduced, self._unreduced = self._unreduced, UnreducedGradients()
        enabled, self._passes.enabled = self._passes.enabled, True
        for param, average in itertools.zip_longest(self._names, averages):
            param.grad = average
            if average is not None:
                self._unreduced.accumulated.add(param)
        try:
            with self.backward():
                pass
            return [None if param.grad is None else param.grad.clone() for param in self._names]
        finally:
            self._unreduced, self._passes.enabled = unreduced, enabled
            for param, grad in kept:
                param.grad = grad

    @property
    def under_way(self) -> bool:
        """Whether a backward has begun and is not finished."""
        return self._passes.active

    @property
    def has_sent(self) -> bool:
        """Whether all buckets of this backward were sent."""
        return self._next == len(self._queue)

    def note_raised(self) -> None:
        """Between two backwards. Most often it is known by then whether the last one raised."""
        self._passes.note_raised()

    def check_reduced(self, params: Iterable[Parameter]) -> None:
        """Raise `RingError` if the gradient of one of ``params`` is not an average, but this
        rank's own.
        """
        self._unreduced.check(params, self._names)

    def agreed_to_stop(self) -> bool:
        """Whether some rank had asked to stop in the last finished backward, on CUDA in the one
        before.

        The same answer on every rank, once. A rank that was asked to stop sets every flag from then
        on, so that no request is missed.
        """
        agreed, flags = False, self._stop_flags
        # Reading the last flag on a GPU would make the host wait for the device, and the device
        # then for the host's next kernel.
        while flags and (flags[-1].immediate or len(flags) > 1):
            agreed = bool(flags.popleft().value() > 0) or agreed
        return agreed

    def _keep_stop_flag(self, flag: Tensor) -> None:
        """Copy ``flag`` (one element), which the next backward overwrites."""
        self._stop_flags.append(self._comm.copy_to_host(flag))

    def remove(self) -> None:
        """Remove the hooks and let go of the buckets; the gradients stay, and with them their
        memory.
        """
        self._hooks.remove()
        self.layout.buckets, self.layout.slots = [], {}
        self._queue, self._works = [], []

    def _revise_layout(self) -> bool:
        """`BucketLayout.revise` while gradients are in the buckets, whose memory the new ones
        take over.
        """
        lent = [param for bucket in self.buckets for param in bucket.lent_params]
        if not self.layout.revise(self.num_finished):
            return False
        for param in lent:
            bucket, index = self.layout.slots[param]
            bucket.take_over(index)
        return True

    def _forget_buckets(self) -> None:
        """They are about to be replaced."""
        self._queue = []
        if self._compressor is not None:
            self._compressor.forget_tensors()

    def _prepare_to_send(self, bucket: Bucket) -> None:
        if self._compressor is None:
            return
        if self._compressor.accepts(bucket.flat.dtype):
            prepare_compressed(bucket, self._compressor)
            return
        self._warn_once(
            f"compression {self._compressor.name!r} does not take gradients of "
            f"{bucket.flat.dtype}: those travel as they are."
        )

    def _begin(self) -> None:
        self._check_dtypes()
        self._before_backward()
        self._unreduced.check_dropped(self._names, self._names)
        self._drop_sent()
        self._turns.begin(self)
        # the others' buckets are still being sent
        self._revise_at_end = not self._turns.is_first(self)
        if not self._revise_at_end:
            self.layout.revise(self.num_finished)
        if self._compressor is not None:
            self._compressor.begin_backward()
        self._passes.active = True
        self._produced_sparse.clear()
        self._parts.begin_backward()
        self._hooks.move_last()  # if the backward before raised
        self._next = 0
        # a bucket of frozen parameters only (a GAN's other half) is not sent
        accumulated = self._unreduced.accumulated
        self._queue = [
            bucket
            for bucket in self.buckets
            if bucket.begin() or not accumulated.isdisjoint(bucket.params)
        ]

    def _check_dtypes(self) -> None:
        for bucket in self.buckets:
            if bucket.params and bucket.params[0].dtype != bucket.flat.dtype:
                raise RingError(
                    f"{bucket.names[0]} has become {bucket.params[0].dtype}, but was "
                    f"{bucket.flat.dtype} when the training began. Convert the module (.double(), "
                    ".to(torch.bfloat16)) before that, or close the training and begin another "
                    "one."
                )

    def _abandon(self) -> None:
        """The current backward has raised. Ranks may differ in that: nothing here waits for
        another one.
        """
        self.num_raised += 1
        self._delivery.abandon(self.buckets)
        changed = set(self._produced_sparse)
        for bucket in self.buckets:
            changed.update(itertools.compress(bucket.params, bucket.produced))
            if bucket.launched:
                changed.update(itertools.compress(bucket.params, bucket.contributed))
        self._unreduced.spoil([param for param in self._names if param in changed])

    def _drop_sent(self) -> None:
        """Of a backward that raised: its buffers are needed again."""
        for _, work in self._works:
            work.wait()
        if self._works and self._compressor is not None:
            self._compressor.start_again()
        self._works = []

    def _take_gradient(self, param: Parameter) -> None:
        # the host's time here is paid once a parameter: a look-up by parameter alone costs as much
        # as all the rest
        passes, sparse = self._passes, self._sparse.params
        if passes.discards:
            return
        if self.on_gradient is not None:
            self.on_gradient(param)
        if not passes.reduces:
            self._unreduced.local.add(param)
            return
        grad = param.grad
        if grad is not None and grad.is_sparse and param not in sparse:
            self._warn_once(self._sparse.travels_dense(self._names[param]))
        del grad  # `Bucket.fill` counts references
        is_sparse = bool(sparse) and param in sparse
        if not passes.enabled:
            if not is_sparse:
                self.layout.slots[param][0].fillers.note()
            self._unreduced.accumulated.add(param)
            return
        if not passes.active:
            self._begin()
        if not passes.explicit:
            passes.watch()
        if is_sparse:
            self._produced_sparse.add(param)
            return
        bucket, index = self.layout.slots[param]
        bucket.fillers.note()
        if bucket.produced[index] or bucket.launched:
            self._parts.add(param, sent=bucket.launched)
            return
        bucket.produced[index] = True
        self.layout.note(bucket.names[index])
        bucket.pending -= 1
        self._hooks.check_order(param)
        while (
            self.num_finished  # the first backward shows whether a gradient comes in several parts
            and self._parts.overlaps
            # a user's hook has yet to run: `finish` sends this backward's buckets
            and not self._hooks.order_changed
            and self._next < len(self._queue)
            and self._queue[self._next].pending == 0
            and self._turns.may_send(self)
        ):
            self._launch()

    def _take_sparse(self, named: list[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
        """Exclude declared sparse parameters from the buckets; returns the others."""
        dense = self._sparse.take(named)
        if self._compressor is not None and len(dense) < len(named):
            self._warn_once(
                f"compression {self._compressor.name!r} does not take sparse gradients: those "
                "travel as they are."
            )
        return dense

    def _launch(self) -> None:
        bucket = self._queue[self._next]
        self._delivery.set_aside(bucket)
        copies = bucket.copies
        fresh = [
            own or param in self._unreduced
            for own, param in zip(bucket.produced, bucket.params, strict=True)
        ]
        bucket.fill(fresh, stop=self.stop_requested)
        if bucket.copies and not copies:
            self._prepare_to_send(bucket)
        works = self._delivery.send(self._next, self._queue, self.active_ranks, self._named)
        self._works += [(bucket, work) for work in works]
        self._next += 1

    def _was_sent(self, param: Parameter) -> bool:
        return param in self._sparse.params or self.layout.slots[param][0].launched

    def _named(self, what: str) -> str:
        raised = f", after {self.num_raised} that raised" if self.num_raised else ""
        return f"backward {self.num_finished + 1} (step {self.num_steps}{raised}): {what}"


class Turns:
    """Reducers send one after the other, in the order in which a backward reached their modules.

    Else the first one's last bucket, which waits for a parameter that only some ranks use, would be
    sent before the second one's on some ranks, and after it on others.
    """

    def __init__(self) -> None:
        # a reducer holds the communicator, and these turns live as long as that: they must not hold
        # the reducer
        self._begun: list[ReferenceType[Reducer]] = []

    def begin(self, reducer: Reducer) -> None:
        others = [other for other in self._living() if other.under_way and other is not reducer]
        self._begun = [ReferenceType(each) for each in (*others, reducer)]

    def is_first(self, reducer: Reducer) -> bool:
        return not self._before(reducer)

    def may_send(self, reducer: Reducer) -> bool:
        return all(other.has_sent for other in self._before(reducer))

    def finish_before(self, reducer: Reducer) -> None:
        for other in self._before(reducer):
            other.finish()

    def _before(self, reducer: Reducer) -> list[Reducer]:
        begun = self._living()
        if begun[:1] == [reducer] or reducer not in begun:
            return []
        return [other for other in begun[: begun.index(reducer)] if other.under_way]

    def _living(self) -> list[Reducer]:
        return [reducer for each in self._begun if (reducer := each()) is not None]


_turns: WeakKeyDictionary[Communicator, Turns] = WeakKeyDictionary()


def turns_of(comm: Communicator) -> Turns:
    """Those of all reducers over ``comm``, however it is recorded."""
    return _turns.setdefault(unrecorded(comm), Turns())
