"""When buckets travel: gradients are averaged over the ranks while backward still goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from lightning_ring.comm.communicator import Communicator, Work
from lightning_ring.comm.cost import DEFAULT_CAP_MB
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.layout import BucketLayout
from lightning_ring.gradients.sending import average_, average_compressed_, prepare_compressed
from lightning_ring.gradients.sizing.auto_buckets import AutoBuckets
from lightning_ring.gradients.sparse import SparseGradients
from lightning_ring.gradients.stop_flag import StopFlag

log = logging.getLogger(__name__)


class Reducer:
    """Averages parameters' gradients over the ranks of ``comm``, bucket by bucket, overlapping backward.

    A hook on every parameter tells when its gradient is there; once all of a bucket's are, and every bucket before it
    has left, the bucket leaves. `finish` sends what is left, waits, and puts the averages into ``param.grad``. It is
    called by whoever runs backward through `backward`; for a plain ``loss.backward()`` inside
    ``plain_backwards(reduced=True)`` the autograd engine calls it. Any other backward stays local: it sends nothing,
    and what it accumulates in ``param.grad`` is this rank's own. As under DistributedDataParallel, the whole of a
    ``param.grad`` travels with the next reduced backward, and a parameter that has a local gradient counts as used.

    Buckets leave in one order on every rank, the reverse of use (`BucketLayout`). A parameter that some ranks used
    averages with zeros from the others; one that no rank used keeps its ``.grad``. Sparse gradients lie in no bucket,
    and are averaged in `finish` (`SparseGradients`). The name of each collective has the number of its backward and of
    the optimizer's step, so that ranks that count differently get an error.

    Args:
        comm: Who takes part.
        named_parameters: Name and parameter, in order of registration. Shared parameters may repeat.
        bucket_cap_mb: Bucket size in MiB.
        auto: Who chooses other sizes after the first few backward passes (`BucketLayout`).
        compressor: Who sends the buckets whose dtype it accepts; `None` sends all of them as they are.
        warn: Called with a message for the user, at most once a message.
        sparse_weights: Gives the parameters that say that their gradients are sparse.

    Attributes:
        enabled: While False, backward leaves gradients local (`no_sync`).
        stop_requested: Set to ask all ranks to stop; travels with the next backward.
        active_ranks: Ranks that the sum is divided by; `None` means all.
        num_finished: Backward passes reduced so far.
        num_steps: Steps of optimizers so far, counted by whoever sees them.
    """

    gathers_sparse: ClassVar[bool] = True  # else sparse gradients travel, and reach the optimizer, dense

    def __init__(
        self,
        comm: Communicator,
        named_parameters: Iterable[tuple[str, Parameter]],
        *,
        bucket_cap_mb: float = DEFAULT_CAP_MB,
        auto: AutoBuckets | None = None,
        compressor: Compressor | None = None,
        warn: Callable[[str], None] = log.warning,
        sparse_weights: Callable[[], set[Parameter]] = set,
    ) -> None:
        self.enabled = True
        self.stop_requested = False
        self.active_ranks: int | None = None
        self.num_finished = 0
        self.num_steps = 0
        self._comm = comm
        self._layout = BucketLayout(comm, bucket_cap_mb, auto)
        self._compressor = compressor
        self._warn = warn
        self._warned: set[str] = set()
        self._names: dict[Parameter, str] = {}
        self._hooking = threading.RLock()  # autograd has a thread for each device, and a module may be on several
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._hook_ids: dict[Parameter, int] = {}
        self._slots: dict[Parameter, tuple[Bucket, int]] = {}
        self.buckets: list[Bucket] = []
        self._ready: set[Parameter] = set()  # gradient produced by this backward
        self._unsent: set[Parameter] = set()  # gradient accumulated inside `no_sync`: travels with the next
        self._local: set[Parameter] = set()  # gradient of a local backward; not on all ranks alike
        self._overtaken: list[Parameter] = []  # a user's hook comes after ours
        self._late: set[Parameter] = set()  # gradient produced again after its bucket had left
        self._repeats = False  # a backward produced a gradient in several parts
        self._delayed = False  # no overlap: everything leaves in `finish`
        self._reduces = False  # a backward now is the training's
        self._active = False
        self._explicit = False
        self._discarding = False
        self._queue: list[Bucket] = []
        self._next = 0
        self._works: list[tuple[Bucket, Work]] = []
        self._stop_flag = StopFlag()
        self._sparse = SparseGradients(comm, sparse_weights, enabled=self.gathers_sparse)
        self.track(named_parameters)

    def track(self, named_parameters: Iterable[tuple[str, Parameter]]) -> list[Parameter]:
        """Take in parameters that are new (later added or thawed); every rank must do so at the same point.

        Returns the new ones.
        """
        new = [
            (name, param)
            for name, param in _unique(named_parameters)
            if param not in self._names and param.requires_grad
        ]
        if not new:
            return []
        for name, param in new:
            self._names[param] = name
            hook = param.register_post_accumulate_grad_hook(self._on_gradient)
            self._hooks.append(hook)
            self._hook_ids[param] = hook.id
        self._take(self._layout.plan(self._take_sparse(new)[::-1]))
        return [param for _, param in new]

    def is_tracked(self, param: Parameter) -> bool:
        return param in self._names

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside leaves gradients local; they travel with the next backward outside."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Backward inside leaves no trace in gradients, and sends none."""
        before = [(param, param.grad) for param in self._names]
        for param, _ in before:
            param.grad = None
        self._discarding = True
        try:
            yield
        finally:
            self._discarding = False
            for param, grad in before:
                param.grad = grad

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the outermost backward: on leaving, gradients are averaged. Nothing happens inside `no_sync`."""
        before, self._reduces = self._reduces, True
        try:
            if not self.enabled or self._active:
                yield
                return
            self._begin()
            self._explicit = True
            try:
                yield
                self.finish()
            finally:
                self._explicit = self._active = False
        finally:
            self._reduces = before

    @property
    def reduces_plain_backwards(self) -> bool:
        return self._reduces

    @contextmanager
    def plain_backwards(self, *, reduced: bool) -> Iterator[None]:
        """Whether a plain ``loss.backward()`` inside is reduced, or stays local."""
        if not reduced:
            self.finish()
        before, self._reduces = self._reduces, reduced
        try:
            yield
            if reduced:
                self.finish()
        finally:
            self._reduces = before

    def finish(self) -> None:
        """Send what has not left, wait for everything, publish the averages. Without a backward under way: nothing.

        Raises:
            CollectiveError: A bucket did not arrive in time; the message names it.
            PeerFailedError: Another rank failed meanwhile.
        """
        if not self._active:
            return
        while self._next < len(self._queue):
            self._launch()
        late, self._late = self._late, set()
        extra = [(param, param.grad) for param in late if param.grad is not None]
        told_to_stop = self._average_sparse()
        for _, work in self._works:
            work.wait()
        if late:
            self._add_late(extra)
        self._complete_averages()
        for bucket in self._queue:
            self._publish(bucket)
        self._local = {param for param in self._local if not (param.requires_grad and self._has_left(param))}
        self._agree_on_sparse()
        if not self.num_finished:
            self._agree_on_repeats()
        if self._works:
            self._stop_flag.keep(self._works[-1][0].stop)
        elif self._sparse.params:
            self._stop_flag.keep(torch.tensor([told_to_stop]))
        self._works = []
        self._unsent.clear()
        self._let_user_hooks_come_first()
        self._active = False
        self.num_finished += 1

    def reduce_without_backward(self) -> None:
        """Take part in a reduction with what was accumulated before, or with zeros, when this rank had no backward."""
        with self.backward():
            pass

    def check_reduced(self, params: Iterable[Parameter]) -> None:
        """
        Raises:
            RingError: The gradient of one of ``params`` is not an average, but what a local backward left on this rank.
        """
        if not self._local:
            return
        own = [param for param in params if param in self._local and param.grad is not None and param.requires_grad]
        if own:
            raise RingError(
                f"an optimizer is about to step {self._names[own[0]]} with a gradient of this rank alone: a backward "
                "added to it that is not the training's, and it was not averaged since. The ranks' parameters would "
                "drift apart. With manual optimization use self.manual_backward(loss) for training; drop gradients of "
                "any other backward with zero_grad(), or take them with torch.autograd.grad(...)."
            )

    def agreed_to_stop(self) -> bool:
        """Whether some rank had asked to stop in the last finished backward, on CUDA in the one before.

        The same answer on every rank, once.
        """
        return self._stop_flag.take()

    def remove(self) -> None:
        """Remove the hooks; the gradients stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _revise_layout(self) -> None:
        buckets = self._layout.revise(self.buckets, self.num_finished)
        if buckets is not None:
            self.buckets = []
            self._take(buckets)

    def _take(self, buckets: Sequence[Bucket]) -> None:
        self.buckets += buckets
        for bucket in buckets:
            self._prepare_to_send(bucket)
            for index, param in enumerate(bucket.params):
                self._slots[param] = bucket, index

    def _prepare_to_send(self, bucket: Bucket) -> None:
        if self._compressor is None:
            return
        if self._compressor.accepts(bucket.flat.dtype):
            prepare_compressed(bucket, self._compressor)
            return
        self._warn_once(
            f"compression {self._compressor.name!r} does not take gradients of {bucket.flat.dtype}: those travel as "
            "they are."
        )

    def _begin(self) -> None:
        for _, work in self._works:  # of a backward that raised: its buffers are needed again
            work.wait()
        self._works = []
        self._revise_layout()
        if self._compressor is not None:
            self._compressor.begin_backward()
        if self.buckets:
            self._layout.begin_backward(self.buckets[0].flat.device)
        self._active = True
        self._ready.clear()
        self._late.clear()
        self._let_user_hooks_come_first()  # left by a backward that raised
        self._next = 0
        # a bucket of frozen parameters only (a GAN's other half) stays at home
        self._queue = [bucket for bucket in self.buckets if bucket.begin() or self._has_unsent(bucket)]

    def _has_unsent(self, bucket: Bucket) -> bool:
        return bool(self._unsent) and any(param in self._unsent for param in bucket.params)

    def _complete_averages(self) -> None:
        """Every bucket has arrived, and is not published yet."""

    def _publish(self, bucket: Bucket) -> None:
        bucket.publish()

    def _let_user_hooks_come_first(self) -> None:
        """What a hook does to a gradient travels then, whenever it was registered."""
        for param in self._overtaken:
            hooks, own = param._post_accumulate_grad_hooks, self._hook_ids[param]
            if own in hooks:
                hooks[own] = hooks.pop(own)
        self._overtaken.clear()

    def _on_gradient(self, param: Parameter) -> None:
        with self._hooking:
            self._take_gradient(param)

    def _take_gradient(self, param: Parameter) -> None:
        if self._discarding:
            return
        if not self._reduces:
            self._local.add(param)
            return
        if param.grad is not None and param.grad.is_sparse and param not in self._sparse.params:
            self._warn_once(self._sparse.notice(param, self._names[param]))
        if not self.enabled:
            self._unsent.add(param)
            return
        if not self._active:
            self._begin()
        if not self._explicit:
            Variable._execution_engine.queue_callback(self._finish_if_outermost)
        if param in self._sparse.params:
            self._ready.add(param)
            return
        bucket, _ = self._slots[param]
        if param in self._ready or bucket.launched:
            self._repeats = True
            if bucket.launched:
                self._late.add(param)
            return
        self._ready.add(param)
        if not self._layout.settled:
            self._layout.note(self._names[param], param.device)
        bucket.pending -= 1
        if next(reversed(param._post_accumulate_grad_hooks)) != self._hook_ids[param]:
            self._overtaken.append(param)  # it has yet to see the gradient: this backward's leave in `finish`
        while (
            not (self._delayed or self._overtaken)
            and self.num_finished  # the first backward shows whether a gradient comes in several parts
            and self._next < len(self._queue)
            and self._queue[self._next].pending == 0
        ):
            self._launch()

    def _take_sparse(self, named: list[tuple[str, Parameter]]) -> list[tuple[str, Parameter]]:
        """Hand sparse ones to their own way; returns those of ``named`` that go into buckets."""
        dense = self._sparse.take(named)
        if self._compressor is not None and len(dense) < len(named):
            self._warn_once(
                f"compression {self._compressor.name!r} does not take sparse gradients: those travel as they are."
            )
        return dense

    def _average_sparse(self) -> bool:
        fresh = {param for param in self._sparse.params if self._is_fresh(param)}
        return self._sparse.average(fresh, self.active_ranks, stop=self.stop_requested, prefix=self._named(""))

    def _agree_on_sparse(self) -> None:
        """After the first backward: parameters whose gradient some rank saw sparse leave the buckets."""
        found = self._sparse.agree(self._names, self._ready | self._unsent, self.active_ranks, self._named(""))
        if found:
            rest = [pair for b in self.buckets for pair in zip(b.names, b.params, strict=True) if pair[1] not in found]
            self.buckets, self._slots = [], {}
            self._take(self._layout.plan(rest))

    def _agree_on_repeats(self) -> None:
        """After the first backward: where some rank has gradients in several parts, no rank sends them early."""
        self._delayed = any(self._comm.all_gather_object(self._repeats))
        if self._delayed:
            self._warn_once(
                "backward produces a gradient in several parts (reentrant checkpointing of a module that is used more "
                "than once). Gradients are therefore sent after backward, without overlap. Use "
                "`checkpoint(..., use_reentrant=False)` to get the overlap back."
            )

    def _finish_if_outermost(self) -> None:
        # With reentrant checkpointing this runs at the end of inner backwards too, while the outer one is still inside
        # the checkpoint's node. What never gets here is finished before the optimizer's step.
        if torch._C._current_autograd_node() is None:
            self.finish()

    def _launch(self) -> None:
        bucket = self._queue[self._next]
        copies = bucket.copies
        bucket.fill([self._is_fresh(param) for param in bucket.params], stop=self.stop_requested)
        if bucket.copies and not copies:
            self._prepare_to_send(bucket)
        self._works.append((bucket, self._send(bucket, self._named(f"bucket {self._next} ({bucket.describe()})"))))
        self._next += 1

    def _is_fresh(self, param: Parameter) -> bool:
        """Whether ``param.grad`` has something that was not reduced yet."""
        return param in self._ready or param in self._unsent or (param in self._local and param.requires_grad)

    def _has_left(self, param: Parameter) -> bool:
        return param in self._sparse.params or self._slots[param][0].launched

    def _named(self, what: str) -> str:
        return f"backward {self.num_finished + 1} (step {self.num_steps}): {what}"

    def _send(self, bucket: Bucket, name: str) -> Work:
        compressor = self._compressor
        if compressor is None or not compressor.accepts(bucket.flat.dtype):
            return average_(bucket.flat, self._comm, self.active_ranks, name)
        return average_compressed_(bucket, compressor, self._comm, self.active_ranks, name)

    def _add_late(self, extra: Sequence[tuple[Parameter, Tensor]]) -> None:
        """Average what backward produced after its bucket had left (a shared module under reentrant checkpointing)."""
        self._warn_once(
            "backward produced a gradient again after it had been sent (reentrant checkpointing of a module that is "
            "used more than once). It was sent a second time; from now on gradients are sent after backward, without "
            "overlap. Use `checkpoint(..., use_reentrant=False)` to get the overlap back."
        )
        self._delayed = True
        grads = dict(extra)
        for bucket in self._queue:
            if not any(param in grads for param in bucket.params):
                continue
            flat = torch.zeros_like(bucket.flat)
            offset = bucket.flat.storage_offset()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param in grads:
                    flat.as_strided(view.size(), view.stride(), view.storage_offset() - offset).copy_(grads[param])
            average_(flat, self._comm, self.active_ranks, self._named(f"late part of {bucket.describe()}")).wait()
            bucket.flat.add_(flat)

    def _warn_once(self, message: str) -> None:
        if message and message not in self._warned:
            self._warned.add(message)
            self._warn(message)


def _unique(named_parameters: Iterable[tuple[str, Parameter]]) -> Iterator[tuple[str, Parameter]]:
    seen: set[Parameter] = set()
    for name, param in named_parameters:
        if param not in seen:
            seen.add(param)
            yield name, param
