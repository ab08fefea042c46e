"""TensorBoard's pages: one layout of custom scalars, hyper-parameters, histograms, and texts about
environment and end, which `lightning-ring report` shows.
"""

from __future__ import annotations

import dataclasses
import platform
import re
import socket
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.host.cores import bound_cores
from lightning_ring.monitor.ring_report import RingReport
from lightning_ring.tools.doctor.packages import version
from lightning_ring.tools.masking import masked


class Dashboard:
    """Writes to the TensorBoard loggers of ``trainer``, on rank 0, what `Logger.log_metrics`
    cannot.

    Layout and hyper-parameters are written at once; hyper-parameters only where the run ``begins``.
    """

    def __init__(self, trainer: Trainer, *, begins: bool = True) -> None:
        if begins:
            _log_hyperparameters(trainer)
        loggers = [one for one in trainer.loggers if isinstance(one, TensorBoardLogger)]
        self._writers: list[Any] = [logger.experiment for logger in loggers]
        charts = layout(trainer)
        for writer in self._writers:
            # it takes one layout, in several fits
            if not getattr(writer, "_ring_layout_written", False):
                writer.add_custom_scalars(charts)
                writer._ring_layout_written = True

    def add_histograms(self, report: RingReport) -> None:
        for writer in self._writers if report.trust_ratios.numel() else ():
            writer.add_histogram("ring/trust_ratio", report.trust_ratios, report.step)

    def record_start(self, trainer: Trainer) -> None:
        """A table of versions, hosts and devices, and the number of ranks as a scalar."""
        rows = ["| of this fit | |", "|---|---|"]
        for name, value in environment(trainer).items():
            # a cell has no line and no bar of its own
            cell = " ".join(value.replace("|", "\\|").split())
            rows.append(f"| {name} | {cell} |")
        self.add_text("ring/environment", "\n".join(rows), trainer.global_step)
        for writer in self._writers:
            writer.add_scalar("ring/world_size", trainer.world_size, trainer.global_step)

    def record_end(self, trainer: Trainer, error: BaseException | None = None) -> None:
        """ "finished", or the error that ended the fit, also that of another rank where it is
        known.
        """
        text = "finished" if error is None else f"{type(error).__name__}: {error}"
        self.add_text("ring/end", text, trainer.global_step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        for writer in self._writers:
            writer.add_text(tag, text, step)


# Pages, charts, and expressions for the tags in each. TensorBoard gives all lines of a run one
# colour, so a chart that compares runs has one line of each.
_PAGES = """
Training:
  loss in training: ["(?!ring/|val|test|best).*loss.*"]
  loss in validation: ["val.*loss.*"]
  accuracy in validation: ["val.*acc.*"]
  gradient norm: [ring/gradient_norm.*]
  learning rate: ["ring/lr/[^/]*$"]
Throughput:
  images per second, all ranks: [ring/images_per_second$]
  images per second, a rank: [ring/images_per_second_per_rank$]
  step, ms: [ring/step_ms$]
  forward, ms: [ring/forward_ms$]
  backward, ms: [ring/backward_ms$]
  memory, GB: [ring/memory_gb$, ring/cuda_peak_gb$]
Communication:
  exposed, ms: [ring/exposed_communication_ms$]
  hidden, ms: [ring/hidden_communication_ms$]
  exposed, share of a step: [ring/communication_share$]
  bus bandwidth, GB/s: [ring/bus_bandwidth_gb_per_s$]
  sent, MB a step and rank: [ring/sent_mb_per_step$]
  slowest rank, ms behind the others: [ring/slowest_rank_behind_ms/.*]
Ranks:
  ranks: [ring/world_size$]
  deaths, in all: [ring/deaths$]
  joins, in all: [ring/joins$]
  standstill of the last change, ms: [ring/standstill_ms$]
Data:
  waiting for data, ms: [ring/data_ms$]
  waiting for data, ms on the slowest rank: [ring/data_ms_slowest$]
  waiting for data, share of the slowest rank's step: [ring/data_share$]
  copying to the device, ms: [ring/copy_ms$]
Optimizer:
  optimizer, ms: [ring/optimizer_ms$]
  trust ratio, median: [ring/trust_ratio/p50$]
"""


def layout(trainer: Trainer) -> dict[str, dict[str, list[Any]]]:
    """The custom scalars' page, with the charts that have values, and one of each metric that
    chooses checkpoints: ``val/R@1`` gives a chart of R@1 in all stages.
    """
    pages = yaml.safe_load(_PAGES)
    if getattr(trainer.strategy, "communicator", None) is None:
        del pages["Communication"]
    if getattr(trainer.strategy, "rank_changes", None) is None:
        del pages["Ranks"]
    if not trainer.enable_validation:
        del pages["Training"]["loss in validation"]
        del pages["Training"]["accuracy in validation"]
    if not any(hasattr(optimizer, "trust_ratios") for optimizer in trainer.optimizers):
        del pages["Optimizer"]["trust ratio, median"]
    for callback in trainer.checkpoint_callbacks:
        name = getattr(callback, "monitor", None)
        if name and not re.search("loss|acc", name):
            metric = name.rpartition("/")[2]
            pages["Training"][metric] = [f"(?!ring/).*{re.escape(metric)}$"]
    return {
        page: {name: ["Multiline", tags] for name, tags in charts.items()}
        for page, charts in pages.items()
    }


def hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """What a run was started with, beside the module's own: strategy, ranks, batch, optimizers;
    under ``ring/``.
    """
    strategy = trainer.strategy
    found: dict[str, Any] = {
        "strategy": getattr(strategy, "strategy_name", type(strategy).__name__),
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
    }
    options: Any = getattr(strategy, "options", None)
    for field in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        value = getattr(options, field.name)
        # hparams.yaml is to be read again, and by anyone
        value = value.total_seconds() if isinstance(value, timedelta) else value
        plain = isinstance(value, (bool, int, float, str, type(None)))
        found[field.name] = value if plain else getattr(value, "name", type(value).__name__)
    loader = trainer.fit_loop._data_source.instance
    # others are not built yet
    if isinstance(loader, DataLoader) and loader.batch_size is not None:
        ranks = trainer.world_size * trainer.accumulate_grad_batches
        found["batch_size_per_rank"] = loader.batch_size
        found["batch_size"] = loader.batch_size * ranks
    return {f"ring/{name}": value for name, value in found.items()}


def _log_hyperparameters(trainer: Trainer) -> None:
    """Before Lightning logs the module's: TensorBoard keeps the first set of a run, which is to
    hold both.
    """
    if not getattr(trainer, "enable_autolog_hparams", True) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    params: dict[str, Any] = {}
    for part in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        if part is not None and part._log_hyperparams:
            params |= part.hparams_initial
    params.pop("_class_path", None)
    for logger in trainer.loggers:
        logger.log_hyperparams(masked(params | hyperparameters(trainer)))


# -- texts


def environment(trainer: Trainer) -> dict[str, str]:
    strategy = trainer.strategy
    communicator = getattr(strategy, "communicator", None)
    ranks = defaultdict(list)
    for rank, host in enumerate(getattr(strategy, "hosts", None) or [socket.gethostname()]):
        ranks[host].append(str(rank))
    hosts = (
        f"{host} (rank{'s' if len(mine) > 1 else ''} {', '.join(mine)})"
        for host, mine in ranks.items()
    )
    return {
        "ranks": str(trainer.world_size),
        "hosts": "; ".join(hosts),
        "strategy": str(getattr(strategy, "strategy_name", type(strategy).__name__)),
        "communicator": "none" if communicator is None else type(communicator).__name__,
        "device of rank 0": _device(strategy.root_device),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning") or "not installed by pip",
        "lightning-ring": version("lightning-ring") or "not installed by pip",
        "system": platform.platform(),
    }


def _device(device: torch.device) -> str:
    if is_gpu(device):
        return str(gpu_module(device).get_device_name(device))
    info = Path("/proc/cpuinfo")
    model = re.search(r"^model name.*: (.*)", info.read_text(), re.M) if info.is_file() else None
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, {len(bound_cores())} cores, {torch.get_num_threads()} threads"
