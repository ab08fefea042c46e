"""The connections of this process to the ranks of a view: opened for each generation, ended when
it is over.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import threading
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.elastic.gloo_sockets import give_up_opening, shut_down_sockets
from lightning_ring.elastic.store import StewardStore
from lightning_ring.errors import PeerFailedError, RingError
from lightning_ring.host.accelerator import is_gpu
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job, Lasting
from lightning_ring.job.members import exchange_members, info_of, own_member
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.interfaces import prefer_interface
from lightning_ring.membership.member import Member
from lightning_ring.membership.view import View


class Generations:
    """Opens a `Job` for each view of ``member``, with the communicator and torch.distributed's
    default group.

    ``backend``, ``timeout``, ``stall_warning`` and ``topology`` are those of `open_communicator`. A
    hierarchy becomes one flat ring while nodes hold different numbers of ranks. When a view is over
    the member's thread ends all waits of this rank; `close` then makes sure that this rank writes
    into no other's memory.
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
        self._store: StewardStore | None = None  # of the generation
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
        # all have come: what follows takes milliseconds
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
        """End this generation, broken by ``error``, or in peace. From here on this rank sends
        and writes nothing.
        """
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
        """Return when everything that this rank has queued on its device is done. A broken
        generation raises.
        """
        if is_gpu(self._device):
            done = torch.cuda.Event()
            done.record()
            # no synchronize: a dead rank's collective never ends
            self.communicator.wait_until(done.query)

    def _end_waits(self, error: PeerFailedError) -> None:
        """In the member's thread, while this rank computes, waits for a collective or opens
        connections.
        """
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
        """End NCCL's kernels, which wait for the dead rank: this rank may wait for them inside the
        driver.

        Each group has a thread: to abort one frees memory, which waits for the kernels of the
        others.
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
    """Let no garbage collection in a process that is forked from this one destroy what this one has
    dropped.

    Groups of an earlier generation may be among it. Their threads are not in a loader's worker
    process, where their destructors therefore crash or wait for ever. Nor may what others do after
    a fork begin a collection before that.
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
