"""What the strategies of the Trainer and of Fabric have in common: ranks, devices, connections and
the collectives that users call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.comm.recording import Listener, RecordedCommunicator
from lightning_ring.integrations.ranks.checkpoint_io import WholeCheckpointIO
from lightning_ring.integrations.ranks.environment import (
    RingEnvironment,
    check_request,
    devices_for,
    ignore_deprecations_between_libraries,
    leave_start_up_messages_to_rank_0,
    requested_devices,
)
from lightning_ring.job.job import Job
from lightning_ring.options import RingOptions

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.data import BatchStatus

T = TypeVar("T")


class OnRingRanks:
    """A strategy on the ranks that the launcher started. Comes before Lightning's `DDPStrategy`
    among the bases.
    """

    multiprocessing_launcher: ClassVar[Any]  # Lightning's, which spawns and forks
    options: RingOptions
    listeners: list[Listener]
    _job: Job | None = None

    @property
    def ring_environment(self: Any) -> RingEnvironment:
        assert isinstance(self.cluster_environment, RingEnvironment)
        return self.cluster_environment

    @property
    def distributed_sampler_kwargs(self: Any) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def communicator(self) -> Communicator | None:
        """What all ranks exchange tensors through, in one order of calls; `None` in a single
        process.
        """
        return self._comm

    @property
    def _comm(self: Any) -> Communicator | None:
        """`None` in a single process, and before the ranks are connected."""
        if self._job is None or (self.world_size == 1 and not self.options.force_communication):
            return None
        return self._job.communicator

    @property
    def _alone(self) -> bool:
        """Whether what this rank does must not wait for others, as after an exception."""
        return False

    @property
    def hosts(self) -> list[str]:
        """Each rank's, by rank; empty before the ranks are connected."""
        return [member.host for member in self._job.members] if self._job is not None else []

    @property
    def checkpoint_io(self: Any) -> CheckpointIO:
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        elif hasattr(self._checkpoint_io, "checkpoint_io"):  # a wrapper of the Trainer's
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()  # has no effect if it wraps one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self: Any, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _configure_launcher(self: Any) -> None:
        request, environment = requested_devices(), self.ring_environment
        if environment.creates_processes_externally:
            check_request(request, environment, self.accelerator)
            self.parallel_devices = devices_for(
                self.accelerator, self.parallel_devices, environment.local_size()
            )
        self._launcher = self._choose_launcher(request.num_nodes)

    def _choose_launcher(self: Any, num_nodes: int) -> Any:
        """The launcher that starts the ranks; `None` in a rank, and for a single process."""
        if self.ring_environment.creates_processes_externally:
            return None
        forks = _IS_INTERACTIVE and self.num_processes * num_nodes > 1
        method = self.options.start_method
        if method != "popen" or forks:  # a notebook is no script that could be run once a rank
            method = "fork" if method == "popen" else method
            return self.multiprocessing_launcher(self, start_method=method)
        if self.num_processes * num_nodes == 1:
            return None
        from lightning_ring.integrations.ranks.launcher import RingLauncher  # no rank needs it

        leave_start_up_messages_to_rank_0()
        use_mpi = self.options.backend in ("auto", "mpi")
        return RingLauncher(self.ring_environment, self.num_processes, num_nodes, use_mpi=use_mpi)

    def _connect(self: Any) -> Communicator | None:
        """Collective."""
        from lightning_ring.loops.ranks import connect_ranks  # not to import a strategy

        ignore_deprecations_between_libraries()
        info = self.ring_environment.discover()
        self._job, comm = connect_ranks(info, self.root_device, self.options)
        if self._job.stalls is not None:
            self._job.stalls.tell_progress(self._progress)
        self._process_group_backend = torch.distributed.get_backend()
        return comm

    def barrier(self, name: str | None = None, *_: Any, **__: Any) -> None:
        if self._comm is not None and not self._alone:
            self._comm.barrier(name=name or "")

    def broadcast(self, obj: T, src: int = 0) -> T:
        if self._comm is None or self._alone:
            return obj
        return self._comm.broadcast_object(obj, src=src, name="strategy.broadcast")

    def _reduce(
        self: Any, tensor: Any, comm: Communicator, group: Any, op: Any, status: BatchStatus | None
    ) -> Tensor | None:
        """`None`: only torch has this operation, or this group."""
        everybody = group is None or group is torch.distributed.group.WORLD
        if not everybody or op not in _OPS or tensor.device.type != self.root_device.type:
            return None
        recorded = RecordedCommunicator(comm, self.listeners) if self.listeners else comm
        return reduce_(tensor, recorded, _OPS[op], status)


_OPS: dict[Any, ReduceOp] = {  # in the spelling of `sync_dist`, torchmetrics and users
    **{name: op for op in ReduceOp for name in (op.value, op.value.upper())},
    **{getattr(torch.distributed.ReduceOp, op.name): op for op in ReduceOp},
    "mean": ReduceOp.AVG,
    "MEAN": ReduceOp.AVG,
}


def agree_on_gather(tensor: Tensor, comm: Communicator, group: Any) -> None:
    """Before a gather of all ranks in torch's default ``group``: one that calls another
    collective would hang there.
    """
    if group is None or group is torch.distributed.group.WORLD:
        comm.barrier(name=f"all_gather of {tensor.dtype} {tuple(tensor.shape)}")


def reduce_(tensor: Tensor, comm: Communicator, op: ReduceOp, status: BatchStatus | None) -> Tensor:
    """Reduce ``tensor`` over the ranks, in place, and return it. A mean of integers is a new float
    tensor.

    Lightning divides epoch means by such a mean, which DDP truncates to an integer.

    ``status`` is given inside a training step if ranks may run out of data. These repeat their last
    batch: they add nothing to a sum, and a mean divides by the number of the other ranks.
    """
    flat = tensor.detach().clone(memory_format=torch.contiguous_format)
    if status is not None and not status.has_data and op in (ReduceOp.SUM, ReduceOp.AVG):
        flat.zero_()
    divide_by = status.active_ranks if status is not None else comm.world_size
    through_autograd = tensor.requires_grad and torch.is_grad_enabled()
    divide_here = op is ReduceOp.AVG and (
        status is not None or not flat.is_floating_point() or through_autograd
    )
    comm.all_reduce_(flat, op=ReduceOp.SUM if divide_here else op, name="reduce").wait()
    if divide_here and not flat.is_floating_point():
        return flat / divide_by
    # without autograd, as torch.distributed: a reduced loss keeps the gradient of this rank's loss,
    # a mean 1/N of it
    tensor.detach().copy_(flat)
    return tensor.div_(divide_by) if divide_here else tensor
