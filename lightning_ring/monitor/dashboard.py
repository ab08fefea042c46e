"""TensorBoard's pages: one layout of custom scalars, hyper-parameters, histograms, and the
buckets of a step.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import platform
import re
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.logger import _convert_params, _flatten_dict, _sanitize_params
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.comm.timing import elapsed
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.host.cores import bound_cores
from lightning_ring.monitor.ring_report import RingReport
from lightning_ring.monitor.step_times import RecordedStep, StepRecord, collective_times
from lightning_ring.timeline.drawing import ON_THE_WIRE, READY, WAITED_FOR, Bar, draw
from lightning_ring.tools.doctor.packages import version

_SECONDS_BETWEEN_IMAGES = 60  # drawing one takes 0.2 to 0.3
_IMAGE = "ring/buckets of a step"


class Dashboard:
    """Writes to the TensorBoard loggers of ``trainer``, on rank 0, what `Logger.log_metrics`
    cannot.

    Layout and hyper-parameters are written at once; hyper-parameters only where the run ``begins``.
    Without TensorBoard: one warning, and nothing is written.
    """

    def __init__(self, trainer: Trainer, *, begins: bool = True) -> None:
        self._loggers = [
            logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)
        ]
        csv_instead = any(isinstance(logger, CSVLogger) for logger in trainer.loggers)
        if not self._loggers and csv_instead and importlib.util.find_spec("tensorboard") is None:
            _warn_of_missing(
                "tensorboard", "scalars go to the other loggers, and its pages are left out"
            )
        self._drawn = time.monotonic()
        if begins:
            _log_hyperparameters(trainer, hyperparameters(trainer))
        charts = layout(
            trust_ratios=any(
                hasattr(optimizer, "trust_ratios") for optimizer in trainer.optimizers
            ),
            communicates=getattr(trainer.strategy, "communicator", None) is not None,
            ranks_change=getattr(trainer.strategy, "rank_changes", None) is not None,
            judged_by=[
                getattr(callback, "monitor", None) for callback in trainer.checkpoint_callbacks
            ],
        )
        for logger in self._loggers:
            # a writer takes one layout, a logger several fits
            if not getattr(logger, "_ring_layout_written", False):
                logger.experiment.add_custom_scalars(charts)
                logger._ring_layout_written = True  # type: ignore[attr-defined]

    def add_histograms(self, report: RingReport) -> None:
        for logger in self._loggers:
            if report.trust_ratios.numel():
                logger.experiment.add_histogram(
                    "ring/trust_ratio", report.trust_ratios, report.step
                )

    def draw_seldom(self, step: RecordedStep | None, report: RingReport | None) -> None:
        """`draw`, once a minute at most."""
        if time.monotonic() - self._drawn > _SECONDS_BETWEEN_IMAGES:
            self.draw(step, report)

    def draw(self, step: RecordedStep | None, report: RingReport | None) -> None:
        """An image of the buckets of ``step``, the last logged one; takes some 0.2 s."""
        if step is None or report is None or not self._loggers:
            return
        if importlib.util.find_spec("matplotlib") is None:
            _warn_of_missing("matplotlib", "the image of a step's buckets is left out")
            return
        self._drawn = time.monotonic()
        title = f"step {report.step} on rank 0: {1e3 * step.record.total:.1f} ms"
        for logger in self._loggers:
            figure = draw(bars(step.record, step.collectives), title=title)
            logger.experiment.add_figure(_IMAGE, figure, report.step)


def layout(
    trust_ratios: bool,
    communicates: bool,
    ranks_change: bool = False,
    judged_by: Sequence[str | None] = (),
) -> dict[str, dict[str, list[Any]]]:
    """The custom scalars' page: categories, charts, and expressions for the tags in each.

    ``judged_by``: metrics that choose checkpoints. ``val/R@1`` gives a chart of R@1 in all stages.
    """
    metrics = {
        name.rpartition("/")[2] for name in judged_by if name and not re.search("loss|acc", name)
    }
    ratios = {"trust ratio, percentiles": ["ring/trust_ratio/.*"]} if trust_ratios else {}
    parts = ("data", "copy", "forward", "backward", "exposed_communication", "optimizer", "other")
    communication = {
        "Communication": {
            "hidden and exposed, ms": [
                "ring/hidden_communication_ms$",
                "ring/exposed_communication_ms$",
            ],
            "exposed, share of a step": ["ring/communication_share$"],
            "bus bandwidth, GB/s": ["ring/bus_bandwidth_gb_per_s$"],
            "sent, MB a step and rank": ["ring/sent_mb_per_step$"],
            "distance of the ranks' parameters from their mean": ["ring/consensus_distance$"],
            "slowest rank, ms behind the others": ["ring/slowest_rank_behind_ms/.*"],
        }
    }
    ranks = {
        "Ranks": {
            "ranks": ["ring/world_size$"],
            "deaths, in all": ["ring/deaths$"],
            "joins, in all": ["ring/joins$"],
            "standstill of the last change, ms": ["ring/standstill_ms$"],
        }
    }
    pages = {
        "Training": {
            "loss": ["(?!ring/).*loss.*"],
            "accuracy": ["(?!ring/).*acc.*"],
            **{name: [f"(?!ring/).*{re.escape(name)}$"] for name in sorted(metrics)},
            "gradient norm": ["ring/gradient_norm.*"],
            "learning rate": ["ring/lr/.*"],
        },
        "Throughput": {
            "images per second, all ranks": ["ring/images_per_second$"],
            "images per second, a rank": ["ring/images_per_second_per_rank$"],
            "where a step goes, ms": [f"ring/{part}_ms$" for part in parts],
            "step, ms": ["ring/step_ms$"],
            "memory, GB": ["ring/memory_gb$", "ring/cuda_.*_gb$"],
        },
        **(communication if communicates else {}),
        **(ranks if ranks_change else {}),
        "Data": {
            "waiting for data, ms": ["ring/data_ms$", "ring/data_ms_slowest$"],
            "waiting for data, share of the slowest rank's step": ["ring/data_share$"],
            "copying to the device, ms": ["ring/copy_ms$"],
        },
        "Optimizer": {"optimizer, ms": ["ring/optimizer_ms$"], **ratios},
    }
    return {
        page: {name: ["Multiline", tags] for name, tags in charts.items()}
        for page, charts in pages.items()
    }


def hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """What a run was started with, beside the module's own: strategy, ranks, batch, optimizers;
    under ``ring/``.
    """
    strategy = trainer.strategy
    options = getattr(strategy, "options", None)
    found: dict[str, Any] = {
        "strategy": getattr(strategy, "strategy_name", type(strategy).__name__),
        "communicator": type(getattr(strategy, "communicator", None)).__name__,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "precision": str(trainer.precision),
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "optimizer": ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers),
    }
    for field in dataclasses.fields(options) if dataclasses.is_dataclass(options) else ():
        value = getattr(options, field.name)
        if isinstance(value, timedelta):
            value = value.total_seconds()
        plain = value is None or isinstance(value, (bool, int, float, str))
        found[field.name] = value if plain else str(getattr(value, "name", type(value).__name__))
    loader = trainer.fit_loop._data_source.instance
    if isinstance(loader, DataLoader) and loader.batch_size is not None:  # others are not built yet
        found["batch_size_per_rank"] = loader.batch_size
        found["batch_size"] = (
            loader.batch_size * trainer.world_size * trainer.accumulate_grad_batches
        )
    return {f"ring/{name}": value for name, value in found.items()}


def _log_hyperparameters(trainer: Trainer, ours: dict[str, Any]) -> None:
    """Before Lightning logs the module's: TensorBoard keeps the first set of a run, which is to
    hold both.
    """
    if not getattr(trainer, "enable_autolog_hparams", True) or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return
    for logger in trainer.loggers:
        if not isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(ours)
            continue
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        theirs = [
            one.hparams_initial
            for one in (module, data)
            if one is not None and one._log_hyperparams
        ]
        metrics = {"ring/images_per_second": 0.0}
        if theirs and logger._default_hp_metric:
            metrics["hp_metric"] = -1.0  # Lightning's own, which it writes with the module's
        merged = {
            key: value for params in theirs for key, value in params.items() if key != "_class_path"
        }
        shown = _sanitize_params(_flatten_dict(_convert_params(merged | ours)))
        _write_hyperparameters(logger, shown, metrics)
        logger.hparams.update(ours)  # for hparams.yaml


def _write_hyperparameters(
    logger: TensorBoardLogger, shown: dict[str, Any], metrics: dict[str, float]
) -> None:
    try:
        from torch.utils.tensorboard.summary import hparams
    except ImportError:  # tensorboardX
        logger.experiment.add_hparams(shown, metrics)
        return
    writer = logger.experiment._get_file_writer()
    for summary in hparams(shown, metrics):
        writer.add_summary(summary)


@cache
def _warn_of_missing(package: str, what_is_left_out: str) -> None:
    rank_zero_warn(
        f"lightning_ring: {package} is not installed: {what_is_left_out}. `pip install "
        "'lightning-ring[monitor]'` brings it; RingStrategy(monitor=False) measures nothing."
    )


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


_COMPUTED = ("data", "copy", "forward", "backward", "optimizer")
_MOST_COLLECTIVES = 48


def bars(record: StepRecord, collectives: Sequence[CollectiveRecord]) -> list[Bar]:
    """Everything that happened in a finished step, by the host's clock, or on CUDA by the
    device's.
    """
    spans = record.spans()
    on_device = [span for span in spans if not isinstance(span[1], float)]
    origin: Any = record.began
    if on_device:  # what the host timed itself, fetching and copying, is on another clock
        spans, origin = (
            on_device,
            min((start for _, start, _ in on_device), key=partial(elapsed, on_device[0][1])),
        )
    found = _computed(
        [
            Bar(part, part, elapsed(origin, start), elapsed(origin, stop))
            for part, start, stop in spans
        ]
    )
    collectives = collectives[:_MOST_COLLECTIVES]
    events = next((one.events for one in collectives if one.events is not None), None)
    shift = elapsed(origin, events[0]) if events is not None else -record.began
    for one, when in zip(collectives, collective_times(collectives), strict=True):
        lane = one.name or one.kind
        found.append(Bar(lane, READY, when.called + shift, when.began + shift))
        found.append(Bar(lane, ON_THE_WIRE, when.began + shift, when.ended + shift))
        start, stop = when.losses[-1]
        found.append(Bar(lane, WAITED_FOR, start + shift, stop + shift))
    return found


def _computed(innermost_first: Sequence[Bar]) -> list[Bar]:
    """In the order in which a step goes, each without what ran inside it: Lightning runs forward
    and backward within ``optimizer_step``, and a manual backward within ``training_step``."""
    found: list[Bar] = []
    for bar in innermost_first:
        found += _without(bar, sorted(found, key=lambda one: one.start))
    return sorted(found, key=lambda bar: (_COMPUTED.index(bar.lane), bar.start))


def _without(bar: Bar, others: Sequence[Bar]) -> list[Bar]:
    """The pieces of ``bar`` outside of ``others``, which are in the order of their starts."""
    pieces, start = [], bar.start
    for other in others:
        if other.stop > start and other.start < bar.stop:
            pieces.append((start, other.start))
            start = other.stop
    pieces.append((start, bar.stop))
    return [Bar(bar.lane, bar.kind, begin, end) for begin, end in pieces if end > begin]
