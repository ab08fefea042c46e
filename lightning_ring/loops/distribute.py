"""`distribute`: a plain PyTorch loop trains on several ranks."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterable, Sequence, Sized
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, DistributedSampler

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import Communicator, ReduceOp
from lightning_ring.comm.recording import Listener
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import Compressor
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.job.job import Job
from lightning_ring.job.ranks import RankInfo
from lightning_ring.loops.ranks import connect_ranks, device_of, find_ranks
from lightning_ring.loops.replicas import Replicas
from lightning_ring.loops.timeline import LoopTimeline
from lightning_ring.options import Backend, BucketCap, RingOptions, Topology
from lightning_ring.timeline.settings import timeline_settings

T = TypeVar("T")
log = logging.getLogger("lightning_ring")


class _Options(RingOptions):
    caller: ClassVar[str] = "distribute"


class Training(Replicas):
    """What `distribute` returns: one module that several ranks train, from there to `close`.

    Also a context manager, which closes it. Its methods are collective unless they say otherwise: all ranks call them,
    in one order.

    Attributes:
        rank, world_size, local_rank: Of this process.
        device: Where the module is.
        communicator: What all ranks exchange tensors through; `None` in a single process.
    """

    def __init__(self, info: RankInfo, job: Job, device: torch.device, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rank, self.world_size, self.local_rank = info.rank, info.world_size, info.local_rank
        self.device = device
        self._job = job
        self._closed = False

    @property
    def communicator(self) -> Communicator | None:
        return self.comm

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """This rank's part of ``dataset``, for a `DataLoader`. Call its ``set_epoch`` at the start of each epoch.

        Not collective. Where the samples do not divide by the ranks, some are repeated, or dropped with ``drop_last``;
        rank 0 warns of it.
        """
        sampler: DistributedSampler[Any] = DistributedSampler(
            dataset, self.world_size, self.rank, shuffle, seed, drop_last
        )
        num_samples = len(cast(Sized, dataset))
        padded = sampler.total_size - num_samples
        if padded and self.rank == 0:
            what = f"{padded} of them are repeated" if padded > 0 else f"{-padded} of them are dropped"
            log.warning(
                "%d samples do not divide by %d ranks: each epoch %s, so that all ranks have equally many.",
                num_samples,
                self.world_size,
                what,
            )
        return sampler

    def all_reduce(self, tensor: Tensor, op: str = "mean") -> Tensor:
        """The ranks' ``tensor`` as one, in new memory. ``op``: "mean", "sum", "min", "max" or "product"."""
        names = {"mean": ReduceOp.AVG} | {one.value: one for one in ReduceOp if one is not ReduceOp.AVG}
        if op not in names:
            raise ConfigurationError(f"all_reduce got op={op!r}, expected one of {', '.join(map(repr, names))}.")
        reduced = tensor.detach().clone(memory_format=torch.contiguous_format)
        if self.comm is None:
            return reduced
        if op == "mean" and not (reduced.is_floating_point() or reduced.is_complex()):
            reduced = reduced.double()
        self.comm.all_reduce_(reduced, op=names[op], name="all_reduce of the loop").wait()
        return reduced

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every rank's ``tensor`` (same shape everywhere), by rank, in a new first dimension."""
        if self.comm is None:
            return tensor.detach().clone().unsqueeze(0)
        return torch.stack(self.comm.all_gather(tensor.detach().contiguous(), name="all_gather of the loop"))

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Rank ``src``'s picklable ``obj``, on every rank."""
        return obj if self.comm is None else self.comm.broadcast_object(obj, src=src)

    def barrier(self) -> None:
        """Return when every rank is here."""
        if self.comm is not None:
            self.comm.barrier()

    def state_dict(self) -> dict[str, Any]:
        """State of the algorithm itself, such as a compressor's residuals; on rank 0 for all ranks."""
        return self.algorithm.state_dict() if self.comm is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`, the same on every rank. Warns where that is impossible."""
        if self.comm is not None and (problem := self.algorithm.load_state_dict(state)) and self.rank == 0:
            log.warning("%s", problem)

    def close(self) -> None:
        """End the training: parameters are complete, hooks are gone, the timeline is written. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        _open.remove(self)
        self.remove()
        if self.timeline is not None:
            self.timeline.finish()

    def _abandon(self) -> None:
        if self._closed:
            return
        self._closed = True
        _open.remove(self)
        self.remove(wait=False)
        if self.timeline is not None:
            self.timeline.abandon()

    def _progress(self) -> str:
        return self.algorithm.progress()

    def __enter__(self) -> Training:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        if self._job.watch is not None and isinstance(error, Exception):
            self._job.watch.report(error)  # the other ranks must not wait while this one cleans up
        self._abandon()


_open: list[Training] = []  # in this process; they share one job and one communicator
_shared: tuple[Any, ...] | None = None  # the settings of that communicator
_num_made = 0


def distribute(
    module: nn.Module,
    optimizers: Optimizer | Sequence[Optimizer] = (),
    *,
    algorithm: str | Algorithm = "ring",
    ranks: int | None = None,
    device: torch.device | str | None = None,
    backend: Backend = "auto",
    topology: Topology = "auto",
    bucket_cap_mb: BucketCap = None,
    compression: str | Compressor | None = None,
    broadcast_buffers: bool = True,
    timeout: timedelta = timedelta(minutes=30),
    stall_warning: timedelta = timedelta(seconds=60),
    force_communication: bool = False,
    timeline: str | Path | None = None,
) -> Training:
    """Train ``module`` on several ranks, in a plain PyTorch loop.

    The ranks are those that mpirun, srun, torchrun or ringrun started. From here on all ranks hold rank 0's parameters,
    buffers and optimizer state; each ``loss.backward()`` that reaches the module's parameters averages gradients over
    the ranks while it runs, and each ``optimizer.step()`` leaves all ranks with the same parameters. Module and
    optimizers stay the objects that they are. A rank that fails or dies ends the job. A single process communicates
    nothing and registers no hook.

    It may be called for several modules: on all ranks, in one order. All ranks run the same backwards and steps.

    Args:
        optimizers: The optimizers of the module's parameters.
        algorithm: A name of `lightning_ring.algorithms.ALGORITHMS` (``"ring"``, ``"ring_sharded"``), or an `Algorithm`,
            which then has its own ``bucket_cap_mb`` and ``compression``.
        ranks: Without a launcher, run this script once on each of so many ranks of this host, and end this process with
            their exit code. With a launcher, how many ranks it must have started. `None`: what was started.
        device: Move the module there; ``"cuda"`` is this rank's GPU. `None`: it stays where it is.
        broadcast_buffers: After each step rank 0's buffers (BatchNorm statistics) replace those of the other ranks.
        backend, topology, bucket_cap_mb, compression, timeout, stall_warning, force_communication, timeline: As of
            `RingStrategy`.

    Raises:
        ConfigurationError: An argument cannot work; the message says what was expected.
        RankDiscoveryError: The launcher's variables contradict each other, or ``ranks``.
        ModelMismatchError: The ranks hold different modules or optimizers.
    """
    options = _Options(
        algorithm=algorithm,
        backend=backend,
        topology=topology,
        bucket_cap_mb=bucket_cap_mb,
        compression=compression,
        timeout=timeout,
        stall_warning=stall_warning,
        force_communication=force_communication,
        timeline=timeline,
    )
    given = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    _check(module, given, broadcast_buffers)
    info = find_ranks(ranks, options)
    place = device_of(module, device, info)
    _move(module, given, place)
    job, comm = _connect(info, place, options)
    global _num_made
    label = f"module {_num_made}: " if _open else ""
    _num_made += 1
    listeners: list[Listener] = []
    about = {"strategy": f"distribute({options.algorithm})"}
    settings = timeline_settings(timeline, os.environ)
    training = Training(
        info,
        job,
        place,
        module,
        given,
        options.new_algorithm(),
        comm,
        broadcast_buffers=broadcast_buffers,
        label=label,
        listeners=listeners,
        timeline=LoopTimeline(settings, comm, place, listeners, about) if not _open else None,
    )
    if job.stalls is not None and not _open:
        job.stalls.tell_progress(training._progress)
    _open.append(training)
    if info.rank == 0 and comm is not None:
        log.info(
            "%d ranks on %d node(s), gradients by %s%s",
            info.world_size,
            info.num_nodes,
            type(comm).__name__,
            training.algorithm.description(),
        )
    return training


def _check(module: nn.Module, optimizers: Iterable[Any], broadcast_buffers: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"distribute got a {type(module).__name__} as module, expected a torch.nn.Module.")
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"distribute got a {type(optimizer).__name__} among its optimizers, expected torch.optim.Optimizer."
            )
    if not isinstance(broadcast_buffers, bool):
        raise ConfigurationError(f"distribute got broadcast_buffers={broadcast_buffers!r}, expected True or False.")
    taken = {id(param) for other in _open for param in other.module.parameters()}
    for name, param in module.named_parameters():
        if id(param) in taken:
            raise ConfigurationError(
                f"distribute was called for a module with {name}, which a module of an earlier call contains: its "
                "gradient would be averaged twice. Pass one module that contains both, or close the earlier training."
            )


def _move(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    if all(param.device == device for param in module.parameters()):
        return
    if is_gpu(device):
        gpu_module(device).set_device(device)
    module.to(device)
    for optimizer in optimizers:
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # which puts tensors where their parameters are


def _connect(info: RankInfo, device: torch.device, options: RingOptions) -> tuple[Job, Communicator | None]:
    global _shared
    names = ("backend", "topology", "timeout", "stall_warning", "force_communication")
    settings = (device, *(getattr(options, name) for name in names))
    if not _open:
        _shared = settings
        return connect_ranks(info, device, options)
    if settings != _shared:
        raise ConfigurationError(
            f"distribute was called with (device, {', '.join(names)}) = {settings}, while a training with {_shared} is "
            "open. Trainings that are open at the same time share their connections: use the same, or close() the "
            "other first."
        )
    return _open[0]._job, _open[0].comm


@atexit.register
def _close_forgotten() -> None:
    """At a normal end of the script: a rank that failed has ended before."""
    for training in list(_open):
        training.close()
