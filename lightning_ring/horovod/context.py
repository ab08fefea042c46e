"""`init`, `shutdown`, the ranks, and process sets."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from lightning_ring.comm.backends.gloo import GlooCommunicator
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.elastic.member import Member
from lightning_ring.horovod.negotiation import Negotiation, Timeline
from lightning_ring.horovod.variables import (
    STALL_WARNING,
    TIMEOUT,
    cpu_backend,
    within_start_timeout,
)
from lightning_ring.horovod.views import Views
from lightning_ring.host.accelerator import gpu_module
from lightning_ring.host.malloc import keep_freed_memory, return_freed_memory
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job, connect
from lightning_ring.job.ranks import discover_ranks


class ProcessSet:
    """Some ranks of the job. `add_process_set` or ``init`` makes it usable."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks = sorted(set(ranks))
        self.process_set_id: int | None = None
        self._negotiation: Negotiation | None = None
        # for `DistributedOptimizer`, by type of device
        self.gradients: dict[str, Communicator] = {}

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        """This process's rank in the set."""
        return self.ranks.index(rank())

    def included(self) -> bool:
        return rank() in self.ranks

    @property
    def negotiation(self) -> Negotiation:
        context()
        if self._negotiation is None:
            problem = "does not contain this rank."
            if self.process_set_id is None:
                problem = (
                    "is not there. Add it first, with hvd.add_process_set; it ends when the ranks "
                    "of an elastic job change."
                )
            raise ValueError(f"the process set of ranks {self.ranks} {problem}")
        return self._negotiation

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _Context:
    def __init__(self, job: Job) -> None:
        self.info = job.info
        self.job = job
        self.sets: dict[int, ProcessSet] = {}
        self.num_sets = 0
        self.keeps_freed_memory = False


_CPU = torch.device("cpu")
global_process_set = ProcessSet([])
# attached to the ranks of a generation, in the order in which they were made
attachments: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()
_context: _Context | None = None
# where a steward started the ranks (`ringrun --min-ranks`)
_views: Views | None = None


def context() -> _Context:
    """What `init` has opened.

    Raises:
        ValueError: It was not called, or `shutdown` was.
    """
    if _context is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _context


def init(comm: Any = None, process_sets: Iterable[ProcessSet] | None = None) -> None:
    """Meet the other ranks, however they were started. Collective; a second call does nothing.

    After another rank's `shutdown` has ended a collective, it meets the ranks anew.

    Args:
        comm: Not taken: the ranks are those that the launcher started. Use ``process_sets``.
        process_sets: Added at once, as by `add_process_set`.
    """
    global _views
    if _context is not None:
        sets = _context.sets.values()
        if not any(one._negotiation and one._negotiation.ended for one in sets):
            return
        shutdown()
    if comm is not None:
        raise ValueError(
            f"init got comm={comm!r}; only the ranks of the launcher are taken. Use process_sets."
        )
    with within_start_timeout():
        if Member.is_wanted():
            _views = _views or Views()
            _views.open(_begin, _leave)
        else:
            job = connect(discover_ranks(), _CPU, TIMEOUT)
            _begin(job, _open(job))
    # here: before the job says goodbye, whose handler was registered before
    atexit.register(shutdown)
    for process_set in process_sets or ():
        add_process_set(process_set)
    if (path := os.environ.get("HOROVOD_TIMELINE")) and path != "DYNAMIC":
        start_timeline(
            path, mark_cycles=os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0")
        )


def _begin(job: Job, negotiated: Communicator) -> None:
    global _context
    gradients = _open(job)
    _context = _Context(job)
    global_process_set.ranks = list(range(job.info.world_size))
    assert job.policy is not None
    _enter(global_process_set, [negotiated, gradients], job.policy)


def reset() -> None:
    """`shutdown` and `init`, where other ranks may be gone. Collective.

    Every `DistributedOptimizer` goes on over the new ranks, without gradients.
    """
    if _views is None:
        shutdown()
        init()
        return
    _views.break_off()
    for attachment in list(attachments.values()):
        attachment.detach()
    stop_timeline()
    _leave()
    _views.close(broken=True)
    _views.open(_begin, _leave)
    for optimizer, attachment in list(attachments.items()):
        attachment.attach(optimizer)


def _leave(*, broken: bool = True) -> None:
    """Close this generation; if it is ``broken``, without the others."""
    global _context
    left, _context = _context, None
    if left is None:
        return
    for one in left.sets.values() if broken else ():
        for comm in one.gradients.values():
            comm.abandon()
    for process_set in reversed(left.sets.values()):
        _close(process_set)
    if left.keeps_freed_memory:
        return_freed_memory()


def elastic_views() -> Views | None:
    """The ranks of this job, if it goes on when some die."""
    return _views


def newcomers_wait() -> bool | None:
    """Whether ranks wait to take part; `None` in a job that takes no others."""
    return None if _views is None else _views.member.newcomers_wait


def _open(job: Job, device: torch.device = _CPU) -> Communicator:
    backend = cpu_backend() if device.type == "cpu" else "auto"
    opened = open_communicator(job, backend, device, TIMEOUT, STALL_WARNING)
    job.communicator = None  # the next one would close it; `_leave` does
    return opened


def gradient_communicator(process_set: ProcessSet, device: torch.device) -> Communicator:
    """Carries buckets of ``device``. Collective the first time on a GPU."""
    found, kind = context(), device.type
    if kind == "cpu":
        found.keeps_freed_memory = found.keeps_freed_memory or keep_freed_memory()
    elif process_set is not global_process_set:
        raise ValueError(
            "DistributedOptimizer got a process_set and parameters on a GPU; that "
            "works on CPUs only."
        )
    elif kind not in process_set.gradients:
        gpu_module(device).set_device(device)
        process_set.gradients[kind] = _open(found.job, device)
        assert found.job.policy is not None
        process_set.negotiation.policies.append(found.job.policy)
    return process_set.gradients[kind]


def _enter(
    process_set: ProcessSet, communicators: Sequence[Communicator], policy: WaitPolicy
) -> None:
    found = context()
    process_set.process_set_id = found.num_sets
    found.sets[found.num_sets] = process_set
    found.num_sets += 1
    if communicators:
        negotiated, process_set.gradients["cpu"] = communicators
        process_set._negotiation = Negotiation(negotiated, process_set.ranks, policy)


def shutdown() -> None:
    """Close what `init` opened. Collective; runs at the normal end of a script too."""
    if _context is None:
        return
    atexit.unregister(shutdown)
    stop_timeline()
    job = _context.job
    # all at once: another rank may wait in any of them
    for process_set in _context.sets.values():
        if process_set._negotiation is not None:
            process_set._negotiation.leave()
    _leave(broken=False)
    if _views is not None:
        _views.close(broken=False)
    else:
        job.close()


def _close(process_set: ProcessSet) -> None:
    if process_set._negotiation is not None:
        process_set._negotiation.close()
    for comm in process_set.gradients.values():
        comm.close()
    process_set.gradients.clear()
    process_set._negotiation = process_set.process_set_id = None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Make a process set usable. All ranks call it.

    Raises:
        ValueError: Ranks ask for different sets, a rank does not exist, or the set exists already.
    """
    found = context()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    global_process_set.negotiation.meet("add_process_set")
    asked: list[list[int]] = global_process_set.gradients["cpu"].all_gather_object(
        added.ranks, name="process sets"
    )
    if any(ranks != asked[0] for ranks in asked):
        told = ", ".join(f"rank {rank} {ranks}" for rank, ranks in enumerate(asked))
        raise ValueError(
            f"the ranks asked for different process sets: {told}. All ranks add the "
            "same, in one order."
        )
    if not added.ranks or added.ranks[0] < 0 or added.ranks[-1] >= found.info.world_size:
        raise ValueError(
            f"a process set of ranks {added.ranks} was asked for; there are "
            f"{found.info.world_size} ranks."
        )
    if any(other.ranks == added.ranks for other in found.sets.values()):
        raise ValueError(f"a process set of ranks {added.ranks} is there already.")
    policy = WaitPolicy(TIMEOUT, found.job.check, STALL_WARNING)
    groups: list[Any] = [
        dist.new_group(added.ranks, timeout=TIMEOUT, backend="gloo") for _ in range(2)
    ]
    own = [GlooCommunicator(group, policy) for group in groups if added.included()]
    _enter(added, own, policy)
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Close a process set, except that of all ranks. All ranks call it. Returns whether it
    existed."""
    found = context()
    number = process_set.process_set_id
    if process_set is global_process_set or number not in found.sets:
        return False
    del found.sets[number]
    _close(process_set)
    return True


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record collectives until `stop_timeline`, in a Chrome trace that rank 0 writes."""
    stop_timeline()
    if rank() == 0:
        global_process_set.negotiation.timeline = Timeline(Path(file_path), mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Write the trace. Without one under way nothing happens."""
    if _context is None:
        return
    negotiation = global_process_set.negotiation
    timeline, negotiation.timeline = negotiation.timeline, None
    if timeline is not None:
        timeline.write()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` not since."""
    return _context is not None


def rank() -> int:
    """This process's number among all ranks, from 0."""
    return context().info.rank


def size() -> int:
    """Ranks of the job."""
    return context().info.world_size


def local_rank() -> int:
    """This process's number among the ranks of its node, from 0."""
    return context().info.local_rank


def local_size() -> int:
    """Ranks on this node."""
    return context().info.local_size


def cross_rank() -> int:
    """This node's number, among the nodes that have a rank of this local rank."""
    return context().info.node_rank


def cross_size() -> int:
    """Nodes of the job."""
    return context().info.num_nodes


def is_homogeneous() -> bool:
    """Whether each node has the same number of ranks."""
    hosts = [member.node for member in context().job.members]
    return len({hosts.count(host) for host in hosts}) == 1
