"""MPI between CPUs, through mpi4py: the ring over nonblocking messages of bytes.

mpi4py is imported when a communicator is built: importing it starts MPI.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_ring.comm.backends.mpi_library import import_mpi
from lightning_ring.comm.calls import describe
from lightning_ring.comm.ring_communicator import RingCommunicator
from lightning_ring.comm.waiting import WaitPolicy, poll_until
from lightning_ring.errors import ConfigurationError

_UNFINISHED: list[Any] = []  # messages of broken communicators: MPI may still write to their memory


class MPICommunicator(RingCommunicator):
    """CPU tensors over a duplicate of ``comm``, an mpi4py communicator (``COMM_WORLD`` if not
    given). Collective.

    Raises:
        ConfigurationError: MPI was started for one thread only.
        RankDiscoveryError: mpi4py or its MPI library is missing, or no MPI launcher started this
            process.
        CollectiveError: Not every rank was here within ``timeout``.
    """

    def __init__(
        self,
        comm: Any = None,
        policy: WaitPolicy | None = None,
        *,
        members: Sequence[int] = (),
        checked: bool = True,
    ) -> None:
        policy = policy or WaitPolicy()
        super().__init__(open_mpi_transport(comm, policy), policy, members, checked)


def open_mpi_transport(comm: Any, policy: WaitPolicy) -> MPITransport:
    """Send and receive over a duplicate of ``comm`` (``COMM_WORLD`` if `None`). Collective."""
    mpi = import_mpi()
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        raise ConfigurationError(
            "MPI was started without MPI_THREAD_MULTIPLE, which a thread beside the computation "
            "needs. Leave mpi4py.rc.thread_level at 'multiple' (the default), or use an MPI "
            "library that supports it."
        )
    return MPITransport(mpi, _duplicate(comm or mpi.COMM_WORLD, policy))


def open_mpi_subgroup(
    comm: Any, parts: Sequence[Sequence[int]], policy: WaitPolicy
) -> MPICommunicator:
    """An MPI communicator for each of the disjoint ``parts`` of ``comm``'s ranks; this rank's is
    returned. Collective.

    As `open_gloo_subgroup`.
    """
    mine, members = next(
        (index, sorted(part)) for index, part in enumerate(parts) if comm.rank in part
    )
    split = comm.Split(mine, comm.rank)
    part = MPICommunicator(split, policy, members=members, checked=False)
    split.Free()
    return part


@dataclass(slots=True, eq=False)
class MPIMessage:
    request: Any
    tensor: Tensor  # kept alive: MPI holds a bare pointer
    peer: int
    receives: bool


class MPITransport:
    """`PointToPoint` over an mpi4py communicator that nobody else uses."""

    while_waiting: Callable[[Sequence[int]], float]

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        # 32,767 at least. Messages with tags above share it, in the order of the calls.
        self._highest_tag: int = mpi.COMM_WORLD.Get_attr(mpi.TAG_UB)
        self._under_way: set[MPIMessage] = set()
        self.rank: int = comm.rank
        self.world_size: int = comm.size

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MPIMessage:
        return self._begin(self._comm.Isend, tensor, dst, tag, receives=False)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> MPIMessage:
        return self._begin(self._comm.Irecv, tensor, src, tag, receives=True)

    def wait(self, requests: Sequence[MPIMessage]) -> None:
        pending = [message.request for message in requests]
        test = pending[0].Test if len(pending) == 1 else lambda: self._mpi.Request.Testall(pending)
        poll_until(
            test,
            lambda: self.while_waiting([m.peer for m in requests if not m.request.Get_status()]),
        )
        self._under_way.difference_update(requests)

    def interrupt(self) -> None:
        return None  # waits ask every 20 ms

    def duplicate(self, policy: WaitPolicy) -> MPITransport:
        return MPITransport(self._mpi, _duplicate(self._comm, policy))

    def close(self, broken: bool) -> None:
        if self._mpi.Is_finalized():
            return
        if not broken:
            # Local in practice, as the MPI standard expects.
            self._comm.Free()
            return
        for message in self._under_way:
            if message.receives:
                message.request.Cancel()
        _UNFINISHED.extend(self._under_way)

    def _begin(
        self, start: Callable[..., Any], tensor: Tensor, peer: int, tag: int, *, receives: bool
    ) -> MPIMessage:
        memory = self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        request = start((memory, self._mpi.BYTE), peer, min(tag, self._highest_tag))
        message = MPIMessage(request, tensor, peer, receives)
        self._under_way.add(message)
        return message


def _duplicate(comm: Any, policy: WaitPolicy) -> Any:
    # `Comm.Dup` would wait for ever for a rank that never comes.
    until = time.monotonic() + policy.seconds
    duplicate, request = comm.Idup()

    def while_waiting() -> None:
        policy.check_peers()
        if time.monotonic() > until:
            raise policy.timeout_error(
                describe("opening an MPI communicator", f"{comm.size} ranks")
            )

    poll_until(request.Test, while_waiting)
    return duplicate
