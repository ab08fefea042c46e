"""torch.distributed: Gloo between CPUs, and with it NCCL between GPUs (`nccl`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.calls import contiguous_flat, of_tensor
from lightning_ring.comm.collective_thread import CollectiveThread
from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, Work
from lightning_ring.comm.exchange import goes_directly
from lightning_ring.comm.ring import check_reducible
from lightning_ring.comm.ring_communicator import Channel, RingCommunicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import ConfigurationError

CHECK_VARIABLE = "RING_CHECK_COLLECTIVES"  # 1: NCCL's calls are compared between ranks

# A fourth one gains nothing.
_NUM_CHANNELS = 3
# Nobody sends under these. The tag chooses among Gloo's connections, one a network interface.
_INTERRUPTING_TAGS = range(4, 8)
_LOOK = timedelta(seconds=0.1)
_NATIVE = (torch.float32, torch.float64)
_GPU_NAMES = {"nccl": ("CUDA", "cuda", torch.cuda), "xccl": ("Intel", "xpu", torch.xpu)}


def open_torch_communicator(
    backend: str = "gloo", policy: WaitPolicy | None = None, device: torch.device | None = None
) -> Communicator:
    """A communicator over all ranks; ``backend`` is gloo, nccl or xccl (Intel's GPUs).

    Collective over the default group. NCCL and XCCL start on ``device``, by default that of the
    default group, or the current one.

    Raises:
        ConfigurationError: The default group is not up, or this torch lacks ``backend``.
    """
    if not dist.is_initialized():
        raise ConfigurationError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group first."
        )
    if backend not in ("gloo", *_GPU_NAMES):
        raise ConfigurationError(
            f"backend={backend!r}; torch.distributed is used with 'gloo', 'nccl' or 'xccl' here."
        )
    if backend in _GPU_NAMES and not (
        dist.is_backend_available(backend) and _GPU_NAMES[backend][2].is_available()
    ):
        raise ConfigurationError(
            f"backend={backend!r} needs {_GPU_NAMES[backend][0]} GPUs and a torch built with "
            f"{backend.upper()}; this process sees none. Use 'gloo' on CPU."
        )
    policy = policy or WaitPolicy()
    host = GlooCommunicator(_own_group(policy), policy)
    if backend == "gloo":
        return host
    # Its kernels are short beside those of backward, and the step waits for them.
    options = getattr(dist, f"ProcessGroup{backend.upper()}").Options(is_high_priority_stream=True)
    options._timeout = policy.timeout
    if device is None or device.index is None:
        _, kind, gpu = _GPU_NAMES[backend]
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        device = bound or torch.device(kind, gpu.current_device())
    # A group that is bound to a device starts at once, so that NCCL can allocate buckets before
    # the first collective.
    group: Any = dist.new_group(
        timeout=policy.timeout, backend=backend, pg_options=options, device_id=device
    )
    return NCCLCommunicator(
        group, host, policy, checked=os.environ.get(CHECK_VARIABLE, "0") not in ("", "0")
    )


def open_gloo_transport(policy: WaitPolicy) -> GlooTransport:
    """Send and receive between all ranks. Collective over the default group."""
    return GlooTransport(_own_group(policy))


def open_gloo_subgroup(parts: Sequence[Sequence[int]], policy: WaitPolicy) -> GlooCommunicator:
    """A Gloo communicator for each of the disjoint ``parts`` of the ranks; this rank's is returned.

    Collective over the whole default group, as torch requires. Ranks of a part are numbered in
    ascending order. It exchanges no headers: all ranks agreed on its calls before.
    """
    groups = [(_own_group(policy, sorted(part)), sorted(part)) for part in parts]
    group, members = next(pair for pair in groups if isinstance(pair[0], dist.ProcessGroup))
    return GlooCommunicator(group, policy, members=members, checked=False)


def _own_group(policy: WaitPolicy, ranks: list[int] | None = None) -> Any:
    """A new group, or on other ranks a constant."""
    # Our timeout comes first: Gloo's errors name no collective.
    limit = policy.timeout + timedelta(seconds=30)
    group = dist.new_group(ranks, timeout=min(limit, policy.opening), backend="gloo")
    if policy.opening < limit and isinstance(group, dist.ProcessGroup):
        limit_waits(group, limit)
    return group


def limit_waits(group: dist.ProcessGroup, limit: timedelta) -> None:
    """Let later collectives of ``group`` take up to ``limit``."""
    for device in group._device_types:
        group._get_backend(device)._set_default_timeout(limit)


class GlooCommunicator(RingCommunicator):
    """CPU tensors over a Gloo ``group`` of its own.

    Reduce-scatter is this package's ring over Gloo's send and receive: Gloo's own takes longer than
    its all-reduce. Longer all-reduces of float32 and float64 are Gloo's own, which needs no
    interpreter while it runs; AVG then divides before it sums, with DistributedDataParallel's bits.
    Gloo's two threads run two of them at a time.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        policy: WaitPolicy,
        *,
        members: Sequence[int] = (),
        checked: bool = True,
    ) -> None:
        super().__init__(GlooTransport(group), policy, members, checked, num_channels=_NUM_CHANNELS)
        self._group = group
        self._arriving = CollectiveThread(policy)
        self._threads.append(self._arriving)

    def all_reduce_(self, tensor: Tensor, *, op: ReduceOp = ReduceOp.SUM, name: str = "") -> Work:
        if tensor.dtype not in _NATIVE or goes_directly(tensor, self.world_size):
            return super().all_reduce_(tensor, op=op, name=name)
        flat = contiguous_flat(tensor, "all_reduce_")
        check_reducible(flat, op)
        what = of_tensor("all_reduce", flat, name, op.value)

        started = _StartedWork()

        def run(channel: Channel) -> None:
            native = getattr(dist.ReduceOp, op.name)
            if op is ReduceOp.AVG:
                flat.div_(self.world_size)
                native = dist.ReduceOp.SUM
            work = dist.all_reduce(flat, op=native, group=self._group, async_op=True)
            started.arrival = self._arriving.submit(what, lambda: self._wait_for(work))

        # torch numbers them in the order of their calls
        started.start = self._start(what, run, channel=self._channels.first)
        return started

    def _wait_for(self, work: dist.Work) -> None:
        """Release the interpreter's lock, except for a moment every tenth of a second."""
        while not work.is_completed():
            self._arriving.while_waiting(())
            with contextlib.suppress(RuntimeError):  # the time is up
                work.wait(_LOOK)
        work.wait()  # raises what went wrong


@dataclass(slots=True, eq=False)
class _StartedWork:
    """The `Work` of a collective that one thread starts, and another one sees end."""

    start: Work = field(default_factory=CompletedWork)
    arrival: Work | None = None

    @property
    def ended(self) -> float | None:
        return getattr(self.arrival, "ended", None)

    def wait(self) -> None:
        self.start.wait()
        assert self.arrival is not None
        self.arrival.wait()

    def done(self) -> bool:
        return self.start.done() and (self.arrival is None or self.arrival.done())


class GlooMessage(NamedTuple):
    """A send or a receive under way."""

    work: dist.Work
    tensor: Tensor  # kept alive: Gloo holds a bare pointer
    peer: int


class GlooTransport:
    """`PointToPoint` over a Gloo process group; ranks are those of the group."""

    while_waiting: Callable[[Sequence[int]], float]

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()
        self.world_size = group.size()

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> GlooMessage:
        return GlooMessage(self._group.send([tensor], dst, tag), tensor, dst)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> GlooMessage:
        return GlooMessage(self._group.recv([tensor], src, tag), tensor, src)

    def wait(self, requests: Sequence[GlooMessage]) -> None:
        for request in requests:
            left = self.while_waiting((request.peer,))
            try:
                request.work.wait(timedelta(seconds=left + 0.01))
            except RuntimeError:
                # Raises if the time is up, and names the collective.
                self.while_waiting((request.peer,))
                raise

    def interrupt(self) -> None:
        peer = (self.rank + 1) % self.world_size
        for tag in _INTERRUPTING_TAGS:
            # a receive that is too late closes Gloo's connections
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, tag).wait(timedelta(milliseconds=1))

    def duplicate(self, policy: WaitPolicy) -> GlooTransport:
        assert self.world_size == dist.get_world_size(), (
            "torch wants all ranks to make a group together"
        )
        return open_gloo_transport(policy)

    def close(self, broken: bool) -> None:
        if not broken and dist.is_initialized():
            dist.destroy_process_group(self._group)
