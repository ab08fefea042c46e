"""The job of this process: the ranks that work together, and the connections between them.

There is one job a process. It outlives a fit, so that a rank that dies between two fits ends the
others too. Rank 0 serves the store, the watch and the stall report: its death ends the job, or the
generation of an elastic one.

After a fit these stay, and do not grow with the number of fits:

- the threads ``ring-watch`` and ``ring-stall``, in rank 0 ``ring-watch-relay``;
- ``sys.excepthook``, ``sys.exit`` and an exit handler;
- the communicator, until the next fit: ``trainer.strategy.barrier()`` uses it;
- torch.distributed's default group, as after DDP. A group that the script opened is never
  destroyed; its store is where the ranks meet.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from lightning_ring.comm import sealed
from lightning_ring.comm.backends.gloo import limit_waits
from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.host import require_open_files
from lightning_ring.host.accelerator import COLLECTIVES, is_gpu
from lightning_ring.job.excepthook import end_job_on_error, stop_ending_job
from lightning_ring.job.members import (
    JobMember,
    check_gpu_assignment,
    exchange_members,
    fit_threads,
    nccl_version,
    own_member,
)
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.rendezvous.interfaces import offer_interface, withdraw_interface
from lightning_ring.job.rendezvous.store import agree_on_secret, open_store
from lightning_ring.job.stalls import StallReporter
from lightning_ring.job.watch.watch import JobWatch

_CONNECTIONS = 2  # to each other rank: of torch.distributed's default group, and of Gloo's own
_OTHER_FILES = 128


@dataclass(frozen=True, slots=True)
class Lasting:
    """What a job has whose ranks come and go, instead of a watch.

    ``check`` raises a `PeerFailedError` once its generation is over. ``memory`` outlives the
    generation. ``opening`` bounds the meeting of ranks: Gloo waits that long for one that has just
    died.
    """

    check: Callable[[], None]
    memory: KeptMemory
    opening: timedelta = timedelta(seconds=10)


class Job:
    """The ranks that work together, and what this process opened to reach them.

    `open_job` and `connect` make one. Its ranks never change; the next job of a process, perhaps
    with other ranks, is the next *generation*.
    """

    def __init__(
        self,
        info: RankInfo,
        members: Sequence[JobMember],
        store: dist.Store,
        watch: JobWatch | None = None,
        device: torch.device | None = None,
        timeout: timedelta = dist.default_pg_timeout,
        lasting: Lasting | None = None,
    ) -> None:
        self.info = info  # this process's rank, and the job's generation
        self.members = list(members)  # by rank
        self.store = store  # for this generation alone; rank 0 serves it
        self.watch = watch  # None in a single process, as is `stalls`
        self.stalls = StallReporter(watch) if watch is not None else None
        # open until the next one is, or the job is closed
        self.communicator: Communicator | None = None
        self.num_communicators = 0
        self.policy: WaitPolicy | None = None
        self.closed = False
        self.lasting = lasting
        self._device = device or torch.device("cpu")
        self._timeout = timeout
        self._num_groups = 0
        self._default_group: dist.ProcessGroup | None = None

    def check(self) -> None:
        """Raise `PeerFailedError` once another rank has failed."""
        if self.lasting is not None:
            self.lasting.check()
        if self.watch is not None:
            self.watch.check()

    def start_fit(self) -> None:
        """Make the job ready for another fit: caught errors no longer count. Collective."""
        offer_interface()
        if self.watch is not None:
            self.watch.reset()
        if dist.is_initialized() and is_gpu(self._device) and self._any_rank_is_broken():
            self.drop_communicator()
            if dist.group.WORLD is self._default_group:
                # A kernel of SyncBatchNorm may still wait for another rank.
                _abort_process_group()
        # or the script destroyed it, as scripts do before a test on one device
        if not dist.is_initialized():
            self.drop_communicator()
            self.open_default_group()

    def _any_rank_is_broken(self) -> bool:
        """Collective."""
        store = dist.PrefixStore(f"broken/{self.num_communicators}", self.store)
        if self.policy is not None and self.policy.error is not None:
            store.set("here", "")
        if store.add("ranks", 1) == self.info.world_size:
            store.set("anywhere", str(store.check(["here"])))
        return store.get("anywhere") == b"True"

    def drop_communicator(self) -> None:
        """Close the communicator, which may hold a bucket that a failed peer never sent."""
        if self.communicator is not None:
            self.communicator.abandon()
            self.communicator = None

    def open_default_group(self) -> None:
        """Start torch.distributed, for torchmetrics and SyncBatchNorm, unless a group is open."""
        if dist.is_initialized():
            return
        if self.lasting is not None:
            # torch names the group after a count that failed attempts raise on one rank alone.
            dist.distributed_c10d._world.group_count = 0
        library = COLLECTIVES.get(self._device.type, "")
        if library == "nccl":
            # SyncBatchNorm and `all_gather(sync_grads=True)` use this group in the same backward as
            # gradients use another communicator. NCCL 2.26 then runs kernels of both in the host's
            # order; else they could deadlock.
            os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        dist.init_process_group(
            f"cpu:gloo,{self._device.type}:{library}"
            if library and dist.is_backend_available(library)
            else "gloo",
            store=dist.PrefixStore(f"default/{self._num_groups}", self.store),
            rank=self.info.rank,
            world_size=self.info.world_size,
            timeout=self._timeout if self.lasting is None else self.lasting.opening,
            device_id=self._device if library else None,
        )
        self._num_groups += 1
        self._default_group = dist.group.WORLD
        if self.lasting is not None and self._default_group is not None:
            limit_waits(self._default_group, self._timeout)

    def close(self) -> None:
        """Close the communicator, the default group if it is this job's, the watch, and the store.
        Collective.

        Rank 0 waits up to `CLOSE_SECONDS` until the others have closed too.
        """
        if self.closed:
            return
        self.closed = True
        self.drop_communicator()
        if self._default_group is not None and dist.group.WORLD is self._default_group:
            dist.destroy_process_group()
        self._default_group = None
        stop_ending_job()
        if self.stalls is not None:
            self.stalls.close()
        if self.watch is not None:
            self.watch.leave_early()
        withdraw_interface()
        self.store = dist.HashStore()  # the last reference to a TCPStore ends its server


_last: Job | None = None  # of this process, open or closed


def current_job() -> Job | None:
    """The open job of this process, if any."""
    return _last if _last is not None and not _last.closed else None


def adopt(job: Job) -> None:
    """Make ``job``, which was opened elsewhere, the current job of this process."""
    global _last
    _last = job


def connect(info: RankInfo, device: torch.device, timeout: timedelta) -> Job:
    """The current job, ready for another fit, if it has the ranks of ``info``; else a new one."""
    job = current_job()
    if job is not None and (job.info.rank, job.info.world_size) == (info.rank, info.world_size):
        job.start_fit()
        return job
    return open_job(info, device, timeout)


def open_job(info: RankInfo, device: torch.device, timeout: timedelta) -> Job:
    """Open a job, and close the current one. Collective over the ranks of ``info``.

    torch.distributed's default group is up afterwards. With several ranks an uncaught exception, or
    an exit code that is not 0, ends the job from here on. A generation that this process has seen
    is replaced by the next. ``timeout`` bounds each wait for another rank.

    Raises:
        ConfigurationError: This process may not open as many connections as there are ranks.
        RankDiscoveryError: Rank 0 cannot be reached, or two ranks were given one GPU.
    """
    global _last
    if _last is not None:
        _last.close()
        info = replace(info, generation=max(info.generation, _last.info.generation + 1))
    watch: JobWatch | None = None
    store: dist.Store = dist.HashStore()
    own = own_member(info, info.rank, device)
    members = [own]
    if info.world_size > 1:
        end_job_on_error(info)
        # in rank 0 also those of the store and of the watch
        each = _CONNECTIONS + 2 * (info.rank == 0)
        num_files = each * info.world_size + _OTHER_FILES
        require_open_files(num_files, f"{info.name} of {info.world_size:,}")
        store = dist.PrefixStore(f"generation {info.generation}", open_store(info, timeout))
        secret = agree_on_secret(info, store)
        sealed.use(secret)
        watch = JobWatch(info, store, secret)
        members = exchange_members(own, info, store)
        fit_threads(info, members)
        if is_gpu(device):  # NCCL's own words are obscure
            check_gpu_assignment(members, nccl_version())
    job = Job(info, members, store, watch, device, timeout)
    job.open_default_group()
    if watch is not None:
        end_job_on_error(info, watch)
    _last = job
    return job


@atexit.register
def _close_default_group() -> None:
    if _last is not None and dist.is_initialized():
        dist.destroy_process_group()
