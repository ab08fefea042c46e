"""The ranks of a plain loop: found, or started, and connected."""

from __future__ import annotations

import os

import torch
from torch import nn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.job.communicators import open_communicator
from lightning_ring.job.job import Job, connect
from lightning_ring.job.launchers import check_not_started_again, launcher_variables
from lightning_ring.job.members import pick_gpu
from lightning_ring.job.ranks import RankInfo, discover_ranks
from lightning_ring.options import RingOptions


def find_ranks(ranks: int | None, options: RingOptions) -> RankInfo:
    """This process's rank. Without a launcher, start this script on ``ranks`` ranks of this host.

    Raises:
        JobFinished: With the job's exit code, in the process that started the ranks.
        ConfigurationError: ``ranks`` is no number of ranks.
        RankDiscoveryError: A launcher started another number of ranks.
    """
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise ConfigurationError(
            f"{options.caller} got ranks={ranks!r}, expected a number of ranks, 1 or more."
        )
    found = launcher_variables(os.environ)
    if found is None and ranks is not None and ranks > 1:
        check_not_started_again(os.environ)
        from lightning_ring.launch.script import JobFinished, script_job  # no rank needs it

        with script_job(ranks, use_mpi=options.backend in ("auto", "mpi")) as job:
            code = job.run()
        raise JobFinished(code)
    if found is not None and ranks not in (None, found.world_size):
        raise RankDiscoveryError(
            f"{options.caller}(ranks={ranks}) was called, but {found.launcher} started "
            f"{found.world_size} ranks. Leave ranks out to take what was started."
        )
    return discover_ranks()


def device_of(module: nn.Module, asked: torch.device | str | None, info: RankInfo) -> torch.device:
    if asked is None:
        return next((param.device for param in module.parameters()), torch.device("cpu"))
    device = torch.device(asked)
    if is_gpu(device) and device.index is None:
        count = gpu_module(device).device_count()
        device = torch.device(device.type, pick_gpu(info.local_rank, info.local_size, count))
    return device


def connect_ranks(
    info: RankInfo, device: torch.device, options: RingOptions
) -> tuple[Job, Communicator | None]:
    """The job of these ranks, with a new communicator; `None` for a single process. Collective."""
    job = connect(info, device, options.timeout)
    if info.world_size == 1 and not options.force_communication:
        return job, None
    comm = open_communicator(
        job,
        options.backend,
        device,
        options.timeout,
        stall_warning=options.stall_warning,
        topology=options.topology,
    )
    return job, comm
