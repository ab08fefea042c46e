"""The devices and the launcher of the ranks, from the arguments of a Trainer or of Fabric."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from lightning.fabric import accelerators as fabric_accelerators
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.connector import _Connector
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.integrations.ranks.messages import leave_start_up_messages_to_rank_0
from lightning_ring.job.gpus import shares_gpus
from lightning_ring.options import RingOptions

_CPU = (CPUAccelerator, fabric_accelerators.CPUAccelerator)
_CUDA = (CUDAAccelerator, fabric_accelerators.CUDAAccelerator)


class DeviceRequest(NamedTuple):
    """``Trainer(devices=, num_nodes=)``, or Fabric's, as the user wrote them; ``"auto"`` and 1
    by default.
    """

    devices: Any = "auto"
    num_nodes: int = 1


def requested_devices() -> DeviceRequest:
    """The arguments of the Trainer, or of the Fabric, that is being built.

    Lightning replaces ``devices="auto"`` by a number before a strategy sees it; only the
    connector's own arguments, which are still on the stack, tell a request for one device from
    none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        connector = isinstance(frame.f_locals.get("self"), (_AcceleratorConnector, _Connector))
        if connector and frame.f_code.co_name == "__init__":
            return DeviceRequest(frame.f_locals["devices"], frame.f_locals["num_nodes"])
        frame = frame.f_back  # type: ignore[assignment]
    return DeviceRequest()


def check_request(
    request: DeviceRequest, environment: RingEnvironment, accelerator: Accelerator | None
) -> None:
    """Compare these arguments with the ranks that the launcher started; those left out follow the
    launcher.

    Where each rank sees one GPU alone, Lightning accepts no other number than 1: that is one a
    rank.
    """
    num_devices = environment.local_size() if request.devices == "auto" else _count(request.devices)
    if num_devices == 1 and isinstance(accelerator, _CUDA) and accelerator.auto_device_count() == 1:
        num_devices = environment.local_size()
    # 1 is also what Lightning makes of a num_nodes that nobody wrote
    if num_devices != environment.local_size() or request.num_nodes not in (
        1,
        environment.num_nodes(),
    ):
        environment.validate_settings(num_devices, request.num_nodes)


def _count(devices: Any) -> int:
    """How many devices ``Trainer(devices=)`` names: a number, ``"2"``, ``-1``, a list, or
    ``"0,1"``.
    """
    if isinstance(devices, (list, tuple)):
        return len(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    count = int(devices)
    return torch.accelerator.device_count() if count == -1 else count


def devices_for(
    accelerator: Accelerator | None, requested: list[torch.device] | None, local_size: int
) -> list[torch.device]:
    """One device for each of the ``local_size`` ranks on this node. More ranks than devices are an
    error.

    Where this process sees one GPU, its launcher gave each rank its own (Slurm's
    ``--gpus-per-task=1``), which every rank calls GPU 0. Whether ranks share one GPU, the job finds
    by its UUID (`check_gpu_assignment`).
    """
    if accelerator is None or isinstance(accelerator, _CPU):
        return [torch.device("cpu")] * local_size
    if requested is not None and len(requested) == local_size:
        return requested
    there = accelerator.auto_device_count()
    if there == 1 and isinstance(accelerator, _CUDA):
        return accelerator.get_parallel_devices([0]) * local_size
    if there < local_size and isinstance(accelerator, _CUDA) and shares_gpus():
        return list(islice(cycle(accelerator.get_parallel_devices(list(range(there)))), local_size))
    if there < local_size:
        raise RankDiscoveryError(
            f"the launcher started {local_size} ranks on this node, which has {there} "
            f"{type(accelerator).__name__} device(s): rank {there} and rank 0 would share one. "
            f"Start at most {there} ranks on this node, or use accelerator='cpu'."
        )
    return accelerator.get_parallel_devices(accelerator.parse_devices(local_size))


def choose_launcher(
    strategy: Any,
    environment: RingEnvironment,
    options: RingOptions,
    num_nodes: int,
    multiprocessing: Callable[..., Any],
) -> Any:
    """The launcher that starts the ranks; `None` in a rank, and for a single process.

    ``multiprocessing`` is the class that spawns and forks, of the Trainer's strategies or of
    Fabric's.
    """
    if environment.creates_processes_externally:
        return None
    if options.start_method != "popen":
        return multiprocessing(strategy, start_method=options.start_method)
    if strategy.num_processes * num_nodes == 1:
        return None
    if _IS_INTERACTIVE:  # a notebook is no script that could be run once a rank
        return multiprocessing(strategy, start_method="fork")
    from lightning_ring.integrations.ranks.launcher import RingLauncher  # no rank needs it

    leave_start_up_messages_to_rank_0()
    use_mpi = options.backend in ("auto", "mpi")
    return RingLauncher(environment, strategy.num_processes, num_nodes, use_mpi=use_mpi)
