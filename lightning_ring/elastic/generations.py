"""The connections of this process to the ranks of a view."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import View
from lightning_ring.elastic.store import StewardStore
from lightning_ring.errors import PeerFailedError, RingError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job, Lasting
from lightning_ring.job.members import exchange_members, info_of, own_member
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.interfaces import prefer_interface

_FAMILY = struct.Struct("=H")
_PORT = struct.Struct("!H")
_PAIR = struct.Struct("=q")
_NO_FLOW = bytes(4)
_SYN_SENT = "02"
_TABLES = {socket.AF_INET: Path("/proc/self/net/tcp"), socket.AF_INET6: Path("/proc/self/net/tcp6")}
_CONNECT_SECONDS = 1.0
_LOOK_SECONDS = 0.01


def shut_down_sockets(exchanged: Iterable[bytes]) -> None:
    """Shut down connections to addresses that ranks have exchanged. Waits on them fail in 20 ms.

    ``exchanged`` are the values of the store in which the groups were opened. Gloo writes its
    listening addresses there (``struct sockaddr``), and each of its connections has one at one end.
    Sockets of other libraries are left alone. Linux; elsewhere nothing is found.
    """
    values = list(exchanged)
    for one in _sockets():
        with contextlib.suppress(OSError):
            ends = [
                _as_stored(one.family, address)
                for address in (one.getsockname(), one.getpeername())
            ]
            if any(_is_among(values, end) for end in ends):
                one.shutdown(socket.SHUT_RDWR)


def give_up_opening(
    exchanged: Sequence[bytes], num_ranks: int, is_opening: Callable[[], bool]
) -> None:
    """End the waits for connections that do not come up, while ``num_ranks`` open groups.

    Gloo waits for each connection five times its timeout, also for a rank that has gone. The first
    is given another connection, which ends at once, the second none. The group may exist
    afterwards; its first collective is then an error. Returns once ``is_opening()`` is false.
    """
    for one in _sockets():
        with contextlib.suppress(OSError):
            listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and _is_among(list(exchanged), _as_stored(one.family, one.getsockname())):
                for pair in range(num_ranks):
                    _connect_for_a_peer(one, pair)
    while is_opening():
        _shut_down_unanswered(list(exchanged))
        time.sleep(_LOOK_SECONDS)


def _connect_for_a_peer(listener: socket.socket, pair: int) -> None:
    """Connect, send the number of this pair of ranks, and hang up."""
    with socket.socket(listener.family) as connection:
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect(listener.getsockname())
        connection.sendall(_PAIR.pack(pair))


def _shut_down_unanswered(values: list[bytes]) -> None:
    """End this process's attempts to connect to exchanged addresses. Gloo repeats each three
    times."""
    unanswered = _unanswered()
    for one in _sockets() if unanswered else ():
        address = unanswered.get(os.fstat(one.fileno()).st_ino)
        if address is not None and _is_among(values, address):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def _unanswered() -> dict[int, bytes]:
    """Addresses of pending connections, as stored, by socket inode (proc_pid_net(5))."""
    found: dict[int, bytes] = {}
    for family, table in _TABLES.items():
        with contextlib.suppress(OSError):
            for fields in map(str.split, table.read_text().splitlines()[1:]):
                if fields[3] == _SYN_SENT:
                    host, _, port = fields[2].partition(":")
                    # as they lie in memory
                    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                    packed = struct.pack(f"={len(words)}I", *words)
                    found[int(fields[9])] = _stored(family, int(port, 16), packed, _NO_FLOW)
    return found


def _sockets() -> Iterator[socket.socket]:
    """Copies of this process's internet sockets: a descriptor's number may be given out again."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    with socket.socket(fileno=os.dup(int(name))) as copy:
                        if copy.family in _TABLES:
                            yield copy


def _as_stored(family: int, address: Any) -> bytes:
    flow = _NO_FLOW if family == socket.AF_INET else struct.pack("!I", address[2])
    return _stored(family, address[1], socket.inet_pton(family, address[0].partition("%")[0]), flow)


def _stored(family: int, port: int, packed: bytes, flow: bytes) -> bytes:
    return (
        _FAMILY.pack(family)
        + _PORT.pack(port)
        + (b"" if family == socket.AF_INET else flow)
        + packed
    )


def _is_among(values: list[bytes], address: bytes) -> bool:
    return any(address in value for value in values)


class Generations:
    """Opens a `Job` for each view of ``member``, with the communicator and torch's default group.

    ``backend``, ``timeout``, ``stall_warning`` and ``topology`` are those of `open_communicator`. A
    hierarchy becomes one flat ring while nodes hold different numbers of ranks.
    """

    def __init__(
        self,
        member: Member,
        backend: str,
        device: torch.device,
        timeout: timedelta,
        stall_warning: timedelta,
        topology: str = "auto",
    ) -> None:
        self.job: Job | None = None
        self._member = member
        self._backend = backend
        self._device = device
        self._timeout = timeout
        self._stall_warning = stall_warning
        self._topology = topology
        self._memory = KeptMemory()
        self._store: StewardStore | None = None
        self._opening = False
        # what is aborted by one thread is not destroyed by another
        self._ending = threading.Lock()
        member.on_stop = self._end_waits

    @property
    def communicator(self) -> Communicator:
        assert self.job is not None, "open() comes first"
        assert self.job.communicator is not None
        return self.job.communicator

    def open(self, view: View) -> Communicator:
        """Connect to the other members of ``view``. Collective.

        Raises:
            PeerFailedError: The view is over already.
        """
        assert self.job is None, "close() comes first"
        leave_garbage_to_parent()
        self._opening = True
        try:
            return self._open(view)
        finally:
            self._opening = False

    def _open(self, view: View) -> Communicator:
        rank, world_size = view.members.index(self._member.number), len(view.members)
        node = int(os.environ.get("RING_NODE_RANK", "0"))  # by the launcher's count
        info = RankInfo(rank, world_size, 0, 1, node, node + 1, "ringrun", view.generation)
        store = self._store = StewardStore(self._member, self._timeout.total_seconds())
        own = own_member(info, self._member.number, self._device)
        members = exchange_members(own, info, store)
        info = info_of(rank, members, "ringrun", view.generation)
        prefer_interface(self._member.address)
        self._memory.regroup([one.launch_rank for one in members if one.node == own.node])
        lasting = Lasting(self._member.check, self._memory)
        self.job = job = Job(info, members, store, None, self._device, self._timeout, lasting)
        job.open_default_group()
        topology = (
            "auto" if self._topology == "hierarchical" and view.generation else self._topology
        )
        limits = self._timeout, self._stall_warning
        communicator = open_communicator(job, self._backend, self._device, *limits, topology)
        self._member.check()
        return communicator

    def close(self, error: RingError | None = None) -> None:
        """End this generation, broken by ``error`` or in peace. This rank then writes nothing
        more."""
        with self._ending:
            job, self.job = self.job, None
        if job is None:
            return
        broken = error is not None or (job.policy is not None and job.policy.error is not None)
        if error is not None:
            if job.policy is not None:
                job.policy.fail(error)
            self._shut_down()
        if job.communicator is not None:
            job.communicator.abandon()
            job.communicator = None
        if dist.is_initialized():
            if broken and is_gpu(self._device):
                # NCCL's kernels wait for the dead rank, and destroying waits for them
                _abort_process_group()
            else:
                dist.destroy_process_group()
        job.closed = True
        self._store = None

    def settle(self) -> None:
        """Return when this rank's device has done everything. A broken generation raises."""
        if is_gpu(self._device):
            done = torch.cuda.Event()
            done.record()
            # no synchronize: a dead rank's collective never ends
            self.communicator.wait_until(done.query)

    def _end_waits(self, error: PeerFailedError) -> None:
        """Runs in the member's thread."""
        store = self._store
        with self._ending:
            job = self.job
            if job is not None:
                if job.policy is not None:
                    job.policy.fail(error)
                self._abort_nccl(job)
        self._shut_down()
        # else it asks the store first, which refuses
        if self._opening and job is not None and store is not None:
            self._give_up_opening(store, job.info.world_size)

    def _abort_nccl(self, job: Job) -> None:
        """End NCCL's kernels, which wait for the dead rank.

        Each group has a thread: aborting one frees memory, which waits for the others' kernels.
        """
        aborts: list[Callable[[], None]] = []
        if isinstance(job.communicator, NCCLCommunicator):
            aborts.append(job.communicator.interrupt)
        if is_gpu(self._device) and dist.is_initialized() and dist.group.WORLD is not None:
            aborts.append(dist.group.WORLD._get_backend(self._device).abort)
        for abort in aborts:
            threading.Thread(target=_end, args=(abort,), name="ring-abort", daemon=True).start()

    def _give_up_opening(self, store: StewardStore, num_ranks: int) -> None:
        def is_opening() -> bool:
            return self._opening and self._store is store

        arguments = store.values, num_ranks, is_opening
        threading.Thread(
            target=give_up_opening, args=arguments, name="ring-opening", daemon=True
        ).start()

    def _shut_down(self) -> None:
        if (store := self._store) is not None:
            shut_down_sockets(store.values)


def _end(abort: Callable[[], None]) -> None:
    # It takes longer than torch allows, or the group was destroyed meanwhile.
    with contextlib.suppress(RuntimeError):
        abort()


@functools.cache
def leave_garbage_to_parent() -> None:
    """Keep a forked child from destroying garbage of this process.

    It may hold groups of an earlier generation, whose threads do not exist in a loader's worker:
    their destructors would crash or hang there.
    """
    forking, was_enabled = threading.Lock(), True  # threads may fork at the same time

    def before() -> None:
        nonlocal was_enabled
        forking.acquire()
        was_enabled = gc.isenabled()
        gc.disable()

    def after() -> None:
        if was_enabled:
            gc.enable()
        forking.release()

    def after_in_child() -> None:
        gc.freeze()
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=after_in_child)
