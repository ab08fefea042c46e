"""`distribute`: a plain PyTorch loop trains on several ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_ring.algorithms import ALGORITHMS
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import Listener
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import Compressor
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.job.job import Job
from lightning_ring.job.ranks import RankInfo
from lightning_ring.loops.ranks import connect_ranks, device_of, find_ranks
from lightning_ring.loops.timeline import LoopTimeline, open_timeline
from lightning_ring.loops.training import Training, open_trainings
from lightning_ring.options import Backend, BucketCap, RingOptions, Topology
from lightning_ring.timeline.settings import timeline_path

log = logging.getLogger("lightning_ring")


class _Options(RingOptions):
    caller: ClassVar[str] = "distribute"
    names: ClassVar[tuple[str, ...]] = tuple(ALGORITHMS)


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

    The ranks are those that mpirun, srun, torchrun or ringrun started. All ranks begin with rank
    0's parameters, buffers and optimizer state. ``loss.backward()`` averages gradients over the
    ranks, so that ``optimizer.step()`` leaves all ranks with the same parameters. A rank that fails
    or dies ends the job. A single process communicates nothing.

    It may be called for several modules: on all ranks, in one order. All ranks run the same
        backwards and steps.

    Args:
        optimizers: The optimizers of the module's parameters.
        algorithm: A name of `lightning_ring.algorithms.ALGORITHMS` (``"ring"``,
            ``"ring_sharded"``), or an `Algorithm`, which then has its own ``bucket_cap_mb`` and
            ``compression``.
        ranks: Without a launcher, run this script once on each of so many ranks of this host, and
            end this process with their exit code. With a launcher, the number that it must have
            started.
        device: Move the module there; ``"cuda"`` or ``"xpu"`` is this rank's GPU, which becomes
            torch's current device. `None`: it stays where it is.
        broadcast_buffers: After each step rank 0's buffers (BatchNorm statistics) replace those of
            the other ranks.
        backend, topology, bucket_cap_mb, compression, timeout: As of `RingStrategy`.
        stall_warning, force_communication, timeline: As of `RingStrategy`.

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
    job, comm, listeners, recorded = _connect(info, place, options)
    global _num_made
    label = f"module {_num_made}: " if open_trainings else ""
    _num_made += 1
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
        timeline=recorded,
    )
    if job.stalls is not None and not open_trainings:
        job.stalls.tell_progress(training.algorithm.progress)
    open_trainings.append(training)
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
        raise ConfigurationError(
            f"distribute got a {type(module).__name__} as module, expected a torch.nn.Module."
        )
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(
                f"distribute got a {type(optimizer).__name__} among its optimizers, expected "
                "torch.optim.Optimizer."
            )
    if not isinstance(broadcast_buffers, bool):
        raise ConfigurationError(
            f"distribute got broadcast_buffers={broadcast_buffers!r}, expected True or False."
        )
    taken = {id(param) for other in open_trainings for param in other.module.parameters()}
    for name, param in module.named_parameters():
        if id(param) in taken:
            raise ConfigurationError(
                f"distribute was called for a module with {name}, which a module of an earlier "
                "call contains: its gradient would be averaged twice. Pass one module that "
                "contains both, or close the earlier training."
            )


def _move(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    # events and kernels go to the current device
    if is_gpu(device):
        gpu_module(device).set_device(device)
    if all(param.device == device for param in module.parameters()):
        return
    module.to(device)
    for optimizer in optimizers:
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())


def _connect(
    info: RankInfo, device: torch.device, options: RingOptions
) -> tuple[Job, Communicator | None, list[Listener], LoopTimeline | None]:
    global _shared
    names = ("backend", "topology", "timeout", "stall_warning", "force_communication")
    settings = (device, *(getattr(options, name) for name in names))
    if open_trainings:
        first = open_trainings[0]
        if settings != _shared:
            raise ConfigurationError(
                f"distribute was called with (device, {', '.join(names)}) = {settings}, while a "
                f"training with {_shared} is open. Trainings that are open at the same time share "
                "their connections: use the same, or close() the other first."
            )
        if options.timeline is not None:
            raise ConfigurationError(
                f"distribute got timeline={str(options.timeline)!r}, while another training is "
                "open: the first one's timeline records all. Give it to the first call."
            )
        return first._job, first.comm, first.listeners, first.timeline
    _shared = settings
    job, comm = connect_ranks(info, device, options)
    listeners: list[Listener] = []
    path = timeline_path(options.timeline, os.environ)
    about = {"strategy": f"distribute({type(options.algorithm).__name__})"}
    return job, comm, listeners, open_timeline(path, comm, device, listeners, about)
