"""What the strategies of the Trainer and of Fabric have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.distributed import _sync_ddp_if_available
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.comm.recording import Listener, RecordedCommunicator
from lightning_ring.integrations.ranks.checkpoint_io import WholeCheckpointIO
from lightning_ring.integrations.ranks.environment import (
    RingEnvironment,
    devices_for,
    devices_left_out,
    ignore_deprecations_between_libraries,
    leave_start_up_messages_to_rank_0,
)
from lightning_ring.job.job import Job
from lightning_ring.options import RingOptions

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.data import BatchStatus

T = TypeVar("T")


class OnRingRanks:
    """A strategy on the launcher's ranks. A base before Lightning's `DDPStrategy`."""

    _job: Job | None = None
    # whether this rank must not wait for others, as after an exception
    _alone = False

    def __init__(self, caller: str, options: RingOptions, **of_every_strategy: Any) -> None:
        super().__init__(  # type: ignore[call-arg]
            cluster_environment=RingEnvironment(caller),
            timeout=options.timeout,
            start_method=options.start_method,
            **of_every_strategy,
        )
        self.options = options
        self.listeners: list[Listener] = []

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
        if self._job is None or (self.world_size == 1 and not self.options.force_communication):
            return None
        return self._job.communicator

    @property
    def hosts(self) -> list[str]:
        """By rank; empty before the ranks are connected."""
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
        environment = self.ring_environment
        if environment.creates_processes_externally:
            local_size, found = environment.local_size(), self.parallel_devices
            one_each = found[0].type == "cuda" and self.accelerator.auto_device_count() == 1
            # where each rank sees one GPU alone, Lightning accepts no other number than 1
            follows = devices_left_out() or (one_each and len(found) == 1)
            environment.validate_settings(local_size if follows else len(found), self.num_nodes)
            self.parallel_devices = devices_for(self.accelerator, found, local_size)
        self._launcher = self._choose_launcher(self.num_nodes)

    def _choose_launcher(self: Any, num_nodes: int) -> Any:
        """`None` in a rank, and for a single process."""
        if self.ring_environment.creates_processes_externally:
            return None
        several, method = self.num_processes * num_nodes > 1, self.options.start_method
        if method == "popen" and several and _IS_INTERACTIVE:
            method = "fork"  # a notebook is no script
        if method != "popen":
            self._start_method = method
            super()._configure_launcher()  # type: ignore[misc]
            return self._launcher
        if not several:
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

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        everybody = _is_everybody(group)
        if self._comm is not None and everybody:
            # in torch's group a rank that calls another collective would hang
            self._comm.barrier(name=f"all_gather of {tensor.dtype} {tuple(tensor.shape)}")
        elif group is None:
            return tensor.unsqueeze(0)
        return super().all_gather(tensor, group, sync_grads)  # type: ignore[misc]

    def _reduce(
        self: Any, tensor: Any, group: Any, op: Any, status: BatchStatus | None = None
    ) -> Any:
        comm = self._comm
        if comm is None or not isinstance(tensor, Tensor):
            return tensor
        on_root_device = tensor.device.type == self.root_device.type
        if not _is_everybody(group) or op not in _OPS or not on_root_device:
            return _sync_ddp_if_available(tensor, group, op)  # only torch has it
        recorded = RecordedCommunicator(comm, self.listeners) if self.listeners else comm
        return reduce_(tensor, recorded, _OPS[op], status)


def _is_everybody(group: Any) -> bool:
    return group is None or group is torch.distributed.group.WORLD


_OPS: dict[Any, ReduceOp] = {  # in the spelling of `sync_dist`, torchmetrics and users
    **{name: op for op in ReduceOp for name in (op.value, op.value.upper())},
    **{getattr(torch.distributed.ReduceOp, op.name): op for op in ReduceOp},
    "mean": ReduceOp.AVG,
    "MEAN": ReduceOp.AVG,
}


def reduce_(tensor: Tensor, comm: Communicator, op: ReduceOp, status: BatchStatus | None) -> Tensor:
    """Reduce ``tensor`` in place, and return it. A mean of integers is a new float tensor.

    Lightning divides epoch means by such a mean, which DDP truncates to an integer.

    ``status``: inside a training step if ranks may run out of data. Those add nothing to a sum, and
    do not count in a mean.
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
