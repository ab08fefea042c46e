"""NCCL through torch.distributed: work is queued on the GPU's streams."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _abort_process_group

from lightning_ring.comm.calls import check_all_to_all, describe, of_tensor
from lightning_ring.comm.communicator import Communicator, ReduceOp, Work, as_bytes, shard
from lightning_ring.comm.requests import Answer, Requests
from lightning_ring.comm.ring import PaddedRows, check_reducible, divides_first, finish_, prepare_
from lightning_ring.comm.waiting import WaitPolicy, poll_until, transport_error
from lightning_ring.errors import CollectiveError, ConfigurationError, RingError

ENDING_SECONDS = 5.0  # collectives whose peers are alive end within that
# A launch takes microseconds, unless the driver's queue is full behind a kernel that never ends.
LAUNCH_SECONDS = 1.0


class Launched(NamedTuple):
    description: str
    since: float  # by the monotonic clock
    work: Any  # of torch.distributed


@dataclass(slots=True, eq=False)
class StreamWork:
    """A collective on the GPU's streams. ``finish`` is queued behind it, once, by the first
    `wait`.

    ``held`` refers to the collective's tensors until then. torch drops them when the first stream
    is ordered after it, perhaps the monitor's: the stream that computes could then reuse memory
    that the collective still reads.
    """

    _description: str
    _work: Any
    _finish: Callable[[], None] | None
    _held: Any

    def order_current_stream(self) -> None:
        """Let the current stream wait for the collective, without ``finish``."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise transport_error(self._description, error) from error

    def wait(self) -> None:
        self.order_current_stream()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._held = None

    def done(self) -> bool:
        return bool(self._work.is_completed())


class StreamQueue:
    """The `Engine` of collectives that the GPU has not ended, as far as the host knows."""

    def __init__(self, policy: WaitPolicy) -> None:
        self._policy = policy
        self._open: deque[Launched] = deque()  # changed by the thread that calls collectives only
        self._last: Launched | None = None
        policy.engines.append(weakref.ref(self))

    def add(self, description: str, work: Any, finish: Callable[[], None], held: Any) -> StreamWork:
        while self._open and self._open[0].work.is_completed():
            self._last = self._open.popleft()
        self._open.append(Launched(description, time.monotonic(), work))
        return StreamWork(description, work, finish, held)

    def head(self) -> Launched | None:
        return next(
            (launched for launched in tuple(self._open) if not launched.work.is_completed()), None
        )

    def under_way(self) -> tuple[str, float] | None:
        head = self.head()
        return head[:2] if head is not None else None

    @property
    def last(self) -> tuple[str, float] | None:
        last = self._last
        for launched in tuple(self._open):
            if not launched.work.is_completed():
                break
            last = launched
        return last[:2] if last is not None else None

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Block until ``reached()``, a point after these collectives.

        Raises:
            PeerFailedError: Another rank failed meanwhile.
            CollectiveError: A collective did not end within the timeout, counted from when it was
                seen to be the first one open.
        """
        policy, known, since, num_warnings = self._policy, None, 0.0, 0

        def check() -> None:
            nonlocal known, since, num_warnings
            policy.raise_if_broken()
            policy.check_peers()
            head = self.head()
            if head is not known:
                known, since, num_warnings = head, time.monotonic(), 0
            if head is None:  # the GPU computes
                return
            seconds = time.monotonic() - since
            num_warnings += policy.warn_of_stall(head.description, seconds, (), num_warnings)
            if seconds > policy.seconds:
                raise policy.fail(policy.timeout_error(head.description))

        poll_until(reached, check)
        # An aborted collective ends too, and leaves no result.
        policy.raise_if_broken()

    def ends_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        poll_until(lambda: self.under_way() is None or time.monotonic() > until, lambda: None)
        return self.under_way() is None


class NCCLCommunicator(Communicator):
    """A GPU's tensors over a ``group`` of its own; CPU tensors, objects and barriers go over
    ``host``.

    The group is NCCL's, or one that behaves alike: RCCL on AMD's GPUs, XCCL on Intel's.

    `Work.wait` orders the current stream after the collective. `abandon`, or NCCL's watchdog in
    torch after the group's timeout, ends a collective that does not finish. A length that is no
    multiple of the world size travels as a padded copy. One rank alone uses NCCL too, which
    measures its cost on one GPU (``force_communication=True``).

    NCCL compares nothing: ranks that call different collectives hang, or get wrong sums. If
    ``checked``, the ranks compare their calls over ``host`` first, one message time each.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        host: Communicator,
        policy: WaitPolicy | None = None,
        *,
        checked: bool = False,
    ) -> None:
        self._group = group
        self._host = host
        self._policy = policy or WaitPolicy()
        self._checked = checked
        self._closed = False
        self._launching = threading.Lock()
        self.queue = StreamQueue(self._policy)
        _open.add(self)
        _abort_at_exit()
        self.rank = host.rank
        self.world_size = host.world_size

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Registered with NCCL if the GPU reduces in NVLink's switches: collectives then copy
        nothing.
        """
        backend = self._group._get_backend(device)
        if getattr(backend, "supports_tensor_alloc", lambda device: False)(device):
            return backend.allocate_tensor(numel, dtype=dtype, device=device)
        return super().empty(numel, dtype, device)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if not self._serves(tensor):
            return self._host.all_reduce_(tensor, op=op, name=name)
        flat, native = self._prepared(tensor.detach().view(-1), op)
        return self._start(
            of_tensor("all_reduce", flat, name, op.value),
            lambda: dist.all_reduce(flat, op=native, group=self._group, async_op=True),
            lambda: self._divide(tensor.detach(), op),
        )

    def reduce_scatter_(self, flat: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if not self._serves(flat):
            return self._host.reduce_scatter_(flat, op=op, name=name)
        flat = flat.detach()
        own = shard(flat, self.world_size, self.rank)
        rows = PaddedRows(flat, self.world_size)
        rows.load()
        sent, native = self._prepared(rows.flat, op)
        target = shard(sent, self.world_size, self.rank)

        def finish() -> None:
            rows.store(self.rank)
            self._divide(own, op)

        return self._start(
            of_tensor("reduce_scatter", flat, name, op.value),
            lambda: dist.reduce_scatter_tensor(
                target, sent, op=native, group=self._group, async_op=True
            ),
            finish,
        )

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Work:
        if not self._serves(flat):
            return self._host.all_gather_(flat, name=name)
        flat = flat.detach()
        rows = PaddedRows(flat, self.world_size)
        rows.load(self.rank)
        sent = as_bytes(rows.flat)
        own = shard(sent, self.world_size, self.rank)
        return self._start(
            of_tensor("all_gather", flat, name),
            lambda: dist.all_gather_into_tensor(sent, own, group=self._group, async_op=True),
            rows.store,
        )

    def all_to_all(
        self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], *, name: str = ""
    ) -> Work:
        if not any(map(self._serves, (*inputs, *outputs))):
            return self._host.all_to_all(inputs, outputs, name=name)
        what = describe("all_to_all", name=name)
        check_all_to_all(inputs, outputs, self.world_size, what)
        sources, targets = list(map(as_bytes, inputs)), list(map(as_bytes, outputs))
        return self._start(
            what, lambda: dist.all_to_all(targets, sources, group=self._group, async_op=True)
        )

    def broadcast_(self, tensor: Tensor, *, src: int = 0, name: str = "") -> Work:
        if not self._serves(tensor):
            return self._host.broadcast_(tensor, src=src, name=name)
        source = dist.get_global_rank(self._group, src)
        return self._start(
            of_tensor("broadcast", tensor, name, f"from rank {src}"),
            lambda: dist.broadcast(as_bytes(tensor), source, group=self._group, async_op=True),
        )

    def wait_until(self, reached: Callable[[], bool]) -> None:
        self.queue.wait_until(reached)

    def open_requests(self, answer: Answer) -> Requests:
        return self._host.open_requests(answer)

    def interrupt(self) -> None:
        """End this group's kernels, from any thread, after the policy has failed.

        A rank inside the driver (``loss.item()``) waits for them. Their tensors hold no result.
        """
        # NCCL frees the communicator, which a launch in another thread may still use.
        mine = self._launching.acquire(timeout=LAUNCH_SECONDS)
        try:
            # Aborting a destroyed group is not safe.
            if not self._closed:
                # torch 2.6 aborts backends alone, not the group
                for device in self._group._device_types:
                    self._group._get_backend(device).abort()
        finally:
            if mine:
                self._launching.release()

    def abandon(self) -> None:
        """Abort the group. Destroying it would wait for the other ranks.

        Collectives that all ranks have called get a moment: parameters of the fit before may be
        among them.
        """
        if not self._closed:
            self._closed = True
            if dist.is_initialized():
                if self._policy.error is None:
                    self.queue.ends_within(ENDING_SECONDS)
                # The script may have destroyed it.
                with contextlib.suppress(ValueError):
                    _abort_process_group(self._group)
            self._host.abandon()

    def close(self) -> None:
        if self._policy.error is not None:
            self.abandon()
        elif not self._closed:
            self._closed = True
            if dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._host.close()

    def _serves(self, tensor: Tensor) -> bool:
        return not tensor.is_cpu

    def _start(
        self, what: str, launch: Callable[[], Any], finish: Callable[[], None] = lambda: None
    ) -> Work:
        self._policy.raise_if_broken()
        if self._closed:
            raise CollectiveError(f"{what}: this communicator was closed; build a new one.")
        if self._checked:  # the host's collectives compare names
            self._host.all_reduce_(torch.zeros(1), name=f"call of {what}").wait()
        try:
            with self._launching:
                self._policy.raise_if_broken()
                # `launch` refers to all tensors.
                return self.queue.add(what, launch(), finish, launch)
        except RingError:
            raise
        except RuntimeError as error:
            raise transport_error(what, error) from error

    def _prepared(self, flat: Tensor, op: ReduceOp) -> tuple[Tensor, Any]:
        """``flat`` as a dtype that NCCL reduces, and NCCL's operation; `_divide` does the rest.

        NCCL's AVG multiplies by 1/N in the tensor's dtype, which is off by up to 0.2 % in 16 bits.
        `prepare_` divides in float32 before the sum.
        """
        check_reducible(flat, op)
        if flat.dtype is torch.int16 or (flat.is_complex() and op is ReduceOp.PRODUCT):
            raise ConfigurationError(
                f"NCCL cannot reduce {flat.dtype} by {op.name}; convert the tensor first."
            )
        prepare_(flat, op, self.world_size)
        averages = flat.is_floating_point() and not divides_first(flat.dtype)
        named = op if op is not ReduceOp.AVG or averages else ReduceOp.SUM
        native = getattr(dist.ReduceOp, named.name)
        if flat.is_complex():
            return torch.view_as_real(flat).view(-1), native
        return flat.view(torch.uint8) if flat.dtype is torch.bool else flat, native

    def _divide(self, reduced: Tensor, op: ReduceOp) -> None:
        if not reduced.is_floating_point():
            finish_(reduced, op, self.world_size)


_open: weakref.WeakSet[NCCLCommunicator] = weakref.WeakSet()


@cache
def _abort_at_exit() -> None:
    """Registered last, it runs before torch's handler destroys the default group."""

    def abort_all() -> None:
        for comm in list(_open):
            if comm.queue.under_way() is not None:
                comm.abandon()

    atexit.register(abort_all)
