"""What a fit runs on and how it ends, as texts in TensorBoard: `lightning-ring report` shows
them.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.host.cores import bound_cores
from lightning_ring.tools.doctor.packages import version


def record_start(trainer: Trainer) -> None:
    """On rank 0: a table of versions, hosts and devices, and the number of ranks as a scalar."""
    rows = "\n".join(f"| {name} | {_cell(value)} |" for name, value in environment(trainer).items())
    for logger in _loggers(trainer):
        logger.experiment.add_text(
            "ring/environment", f"| of this fit | |\n|---|---|\n{rows}", trainer.global_step
        )
        logger.experiment.add_scalar("ring/world_size", trainer.world_size, trainer.global_step)


def record_change(trainer: Trainer, text: str) -> None:
    """On rank 0: ranks have died or come."""
    for logger in _loggers(trainer):
        logger.experiment.add_text("ring/ranks", text, trainer.global_step)


def record_end(trainer: Trainer, error: BaseException | None = None) -> None:
    """On rank 0: "finished", or the error that ended the fit, also that of another rank where it
    is known.
    """
    text = "finished" if error is None else f"{type(error).__name__}: {error}"
    for logger in _loggers(trainer):
        logger.experiment.add_text("ring/end", text, trainer.global_step)


def environment(trainer: Trainer) -> dict[str, str]:
    strategy = trainer.strategy
    communicator = getattr(strategy, "communicator", None)
    return {
        "ranks": str(trainer.world_size),
        "hosts": _ranks_by_host(getattr(strategy, "hosts", None) or [socket.gethostname()]),
        "strategy": str(getattr(strategy, "strategy_name", type(strategy).__name__)),
        "communicator": "none" if communicator is None else type(communicator).__name__,
        "device of rank 0": _device(strategy.root_device),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{
            name: version(name) or "not installed by pip"
            for name in ("lightning", "lightning-ring")
        },
        "system": platform.platform(),
    }


def _loggers(trainer: Trainer) -> list[TensorBoardLogger]:
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _ranks_by_host(hosts: Sequence[str]) -> str:
    ranks: dict[str, list[str]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(str(rank))
    return "; ".join(
        f"{host} (rank{'s' if len(mine) > 1 else ''} {', '.join(mine)})"
        for host, mine in ranks.items()
    )


def _device(device: torch.device) -> str:
    if is_gpu(device):
        return str(gpu_module(device).get_device_name(device))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = next(iter(names), platform.processor() or platform.machine())
    return f"{name}, {len(bound_cores())} cores, {torch.get_num_threads()} threads"
