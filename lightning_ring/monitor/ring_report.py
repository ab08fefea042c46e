"""The numbers of all ranks as one report: scalars under ``ring/`` and a line on the progress
bar.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator, CompletedWork, Work, shard
from lightning_ring.comm.host_copy import HostCopy, on_host
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.monitor.step_times import StepTimes

_MS = 1e3
_MB = 1e6
_GB = 1e9
_TIMES = {part: part for part in ("data", "copy", "forward", "backward", "optimizer", "other")}
_TIMES["exposed"] = "exposed_communication"
PERCENTILES = (5, 50, 95)


@dataclass(frozen=True, slots=True)
class RingReport:
    """One logged step of all ranks.

    Attributes:
        step: As Lightning counts it for loggers.
        rows: By rank.
        gradient_norms: Of each optimizer, in their order; `None` of one that did not step.
        skipped: Steps without finite gradients that were left out since training began.
        learning_rates: By name.
        trust_ratios: Last one of each parameter that adapts; empty with other optimizers.
    """

    step: int
    rows: Sequence[RankRow]
    gradient_norms: Sequence[float | None] = ()
    skipped: float = 0.0
    learning_rates: dict[str, float] = field(default_factory=dict)
    trust_ratios: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def images_per_second(self) -> float:
        """Of all ranks; NaN where nobody can tell."""
        seconds = max(row.times.total for row in self.rows)
        return sum(row.times.images for row in self.rows) / seconds if seconds > 0 else math.nan

    @property
    def data_share(self) -> float:
        """Of a step of the slowest rank, spent waiting for data: that of others holds nobody up."""
        times = self._slowest.times
        return times.data / (times.total or math.nan) if self._timed else math.nan

    @property
    def communication_share(self) -> float:
        """Of a step, lost to collectives; the mean over ranks."""
        return self._mean("exposed") / (self._mean("total") or math.nan)

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank whose own time is longest, and by how many seconds a step the median of the
        others is shorter.

        Its own time is that in which it does not wait for others: all ranks end a step together, so
        that the step itself takes equally long everywhere.
        """
        slowest = self._slowest
        others = [row.times.own for row in self.rows if row is not slowest]
        return slowest.rank, slowest.times.own - statistics.median(others) if others else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second, on the rank whose collectives took least: the others' times hold
        waiting for a slow rank.
        """
        return max(
            (row.times.sent / row.times.busy for row in self.rows if row.times.busy > 0),
            default=0.0,
        )

    def scalars(self) -> dict[str, float]:
        """By name; what cannot be told is left out.

        In units and digits with which TensorBoard's ticks differ: it writes three digits. The
        slowest rank is in the name of a scalar, because TensorBoard would smooth a rank's number.
        """
        found = {
            "memory_gb": round(_most(row.memory.resident for row in self.rows) / _GB, 2),
            "skipped_steps": self.skipped,
            **{f"lr/{name}": lr for name, lr in self.learning_rates.items()},
            **self._times(),
            **self._communication(),
            **self._cuda_memory(),
            **self._percentiles(),
        }
        found = {name: number for name, number in found.items() if not math.isnan(number)}
        for number, norm in enumerate(self.gradient_norms):
            if norm is not None:  # one that is not finite is news
                found[
                    "gradient_norm" if len(self.gradient_norms) == 1 else f"gradient_norm/{number}"
                ] = norm
        return {f"ring/{name}": number for name, number in found.items()}

    def bar(self) -> dict[str, str]:
        """For a progress bar: short names and texts, which all bars show as they are."""
        if not self._timed:
            return {}
        shown: dict[str, str] = {}
        if math.isfinite(self.images_per_second):
            shown["img/s"] = f"{self.images_per_second:.0f}"
        shown["data"] = f"{self.data_share:.0%}"
        if self._communicates:
            shown["comm"] = f"{self.communication_share:.0%}"
        if len(self.rows) > 1:
            rank, behind = self.slowest
            shown["slowest"] = f"rank {rank} +{behind * _MS:.0f} ms"
        return shown

    @property
    def _slowest(self) -> RankRow:
        return max(self.rows, key=lambda row: row.times.own)

    @property
    def _timed(self) -> bool:
        return all(row.times.steps for row in self.rows)

    @property
    def _communicates(self) -> bool:
        return any(row.times.busy > 0 for row in self.rows)

    def _mean(self, part: str) -> float:
        return sum(getattr(row.times, part) for row in self.rows) / len(self.rows)

    def _times(self) -> dict[str, float]:
        if not self._timed:
            return {}
        return {
            "images_per_second": self.images_per_second,
            "images_per_second_per_rank": self.images_per_second / len(self.rows),
            "step_ms": self._mean("total") * _MS,
            **{f"{name}_ms": self._mean(part) * _MS for part, name in _TIMES.items()},
            "data_ms_slowest": max(row.times.data for row in self.rows) * _MS,
            "data_share": self.data_share,
        }

    def _communication(self) -> dict[str, float]:
        found: dict[str, float] = {}
        if not self._timed:
            return found
        if self._communicates:
            found = {
                "communication_ms": self._mean("busy") * _MS,
                "hidden_communication_ms": self._mean("hidden") * _MS,
                "communication_share": self.communication_share,
                "bus_bandwidth_gb_per_s": self.bus_bandwidth / 1e9,
                "sent_mb_per_step": float(f"{self._mean('sent') / _MB:.2g}"),
            }
        if len(self.rows) > 1:
            rank, behind = self.slowest
            found[f"slowest_rank_behind_ms/rank_{rank}"] = behind * _MS
        return found

    def _cuda_memory(self) -> dict[str, float]:
        names = ("allocated", "reserved", "peak")
        most = {
            name: round(_most(getattr(row.memory, name) for row in self.rows) / _GB, 2)
            for name in names
        }
        return {f"cuda_{name}_gb": size for name, size in most.items() if most["reserved"] > 0}

    def _percentiles(self) -> dict[str, float]:
        if not self.trust_ratios.numel():
            return {}
        at = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
        values = torch.quantile(self.trust_ratios.double(), at).tolist()
        return {
            f"trust_ratio/p{percent:02d}": value
            for percent, value in zip(PERCENTILES, values, strict=True)
        }


def _most(numbers: Iterable[float]) -> float:
    """The greatest; NaN where one of them is, which `max` may overlook."""
    found = list(numbers)
    return math.nan if any(math.isnan(number) for number in found) else max(found)


# a squared norm of gradients that did not step; so is its sum with what other ranks have
UNKNOWN = -math.inf


@dataclass(slots=True)
class LoggedStep:
    """A logged step, until all ranks' rows are here."""

    step: int
    learning_rates: dict[str, float]
    trust_ratios: Tensor
    rows: RowExchange

    def report(self) -> RingReport:
        rows, sums = self.rows.finish()
        uncounted, *squares = sums.tolist()
        ratios = self.trust_ratios
        return RingReport(
            step=self.step,
            rows=rows,
            gradient_norms=[None if square < 0 else math.sqrt(square) for square in squares],
            skipped=rows[0].skipped + uncounted / len(rows),  # all ranks skip the same steps
            learning_rates=self.learning_rates,
            trust_ratios=ratios[~ratios.isnan()],
        )


def numbers_on_device(
    uncounted: Tensor, squares: Sequence[Tensor | None], device: torch.device
) -> Tensor:
    """1-D, float64: skipped steps, and ``squares`` of each optimizer."""
    unknown = torch.full((), UNKNOWN, dtype=torch.float64)
    numbers = [uncounted, *(unknown if one is None else one for one in squares)]
    return torch.stack([number.to(device, non_blocking=True) for number in numbers])


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that a rank holds. The GPU allocator's are zero on a CPU."""

    # this process's, without its data-loading workers; its peak if the system tells no more
    resident: float = 0.0
    allocated: float = 0.0  # tensors on the device
    reserved: float = 0.0  # held by the allocator
    peak: float = 0.0  # largest ``allocated`` since the process started, or since a reset

    @classmethod
    def unknown(cls) -> RankMemory:
        return cls(*[math.nan] * len(fields(cls)))

    @classmethod
    def now(cls, device: torch.device) -> RankMemory:
        if not is_gpu(device):
            return cls(_resident())
        gpu = gpu_module(device)
        sizes = (
            gpu.memory_allocated(device),
            gpu.memory_reserved(device),
            gpu.max_memory_allocated(device),
        )
        return cls(_resident(), *sizes)


def _resident() -> float:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        try:
            import resource
        except ModuleNotFoundError:  # Windows
            return 0.0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank's numbers since the last logged step."""

    rank: int
    skipped: float  # steps that a loss scaler left out since training began
    times: StepTimes  # means over the steps, on CUDA over the steps that the device has finished
    memory: RankMemory

    def as_list(self) -> list[float]:
        return [self.rank, self.skipped, *astuple(self.times), *astuple(self.memory)]

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> RankRow:
        rank, skipped, *rest = numbers
        times, memory = rest[:_NUM_TIMES], rest[_NUM_TIMES:]
        return cls(int(rank), skipped, StepTimes(*times), RankMemory(*memory))


_NUM_TIMES = len(fields(StepTimes))
_NUM_NUMBERS = 2 + _NUM_TIMES + len(fields(RankMemory))


class RowExchange:
    """An all-gather of every rank's row, under way; before `wait` nothing waits for it, nor for the
    device.

    ``on_device`` are further numbers (1-D, float64) that may lie on the device, of one length on
    all ranks.
    """

    def __init__(
        self, comm: Communicator | None, row: RankRow, on_device: Tensor, device: torch.device
    ) -> None:
        self._world_size = comm.world_size if comm is not None else 1
        numbers = torch.tensor(row.as_list(), dtype=torch.float64)
        if is_gpu(device):
            numbers = numbers.pin_memory().to(device, non_blocking=True)
        numbers = torch.cat([numbers, on_device.to(numbers.device)])
        self._width = numbers.numel()
        self._flat = numbers.new_zeros(self._world_size * self._width)
        index = comm.shard_index if comm is not None else 0
        shard(self._flat, self._world_size, index).copy_(numbers)
        self._work: Work | None = CompletedWork()
        if comm is not None and comm.world_size > 1:
            self._work = comm.all_gather_(self._flat, name="monitor")
        self._comm = comm
        self._copy: HostCopy | None = None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        if self._work is not None and self._work.done():
            self._start_copy()
        return self._work is None and (self._copy is None or self._copy.ready())

    def wait(self) -> None:
        """Block until all ranks' rows are on the host. Raises `RingError`: as `Work.wait`."""
        self._start_copy()
        if self._copy is not None:
            self._flat = self._copy.value()

    def table(self) -> Tensor:
        """Block until all ranks' numbers are on the host; a row a rank. Raises `RingError`: as
        `Work.wait`.
        """
        self.wait()
        return self._flat.view(-1, self._width)

    def take(self, table: Tensor) -> None:
        """Have ``table``, which all ranks have, in the place of what this exchange has brought."""
        self._flat = table.flatten()

    def finish(self) -> tuple[list[RankRow], Tensor]:
        """After `wait`: all ranks' rows, by rank, and the sum over ranks of what was
        ``on_device``.
        """
        table = self._flat.view(-1, self._width)
        rows = [RankRow.from_list(row) for row in table[:, :_NUM_NUMBERS].tolist()]
        return sorted(rows, key=lambda row: row.rank), table[:, _NUM_NUMBERS:].sum(0)

    def _start_copy(self) -> None:
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        if not on_host(self._flat):
            self._copy = HostCopy(
                self._flat, self._comm.wait_until if self._comm is not None else None
            )


def gradient_squares(strategy: Any, optimizer: Optimizer) -> Tensor:
    """What this rank adds to the squared norm of the optimizer's gradients (0-d, float64).

    Under other strategies than ours what this rank holds.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if hasattr(strategy, "gradient_squares"):
        squares: Tensor = strategy.gradient_squares(params)
        return squares
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
    return norms.square().sum()


def learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Of each parameter group: ``SGD``, or ``SGD/1`` for the second group, ``SGD-1`` for the
    second SGD.
    """
    found: dict[str, float] = {}
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    for number, (kind, optimizer) in enumerate(zip(kinds, optimizers, strict=True)):
        earlier = kinds[:number].count(kind)
        name = f"{kind}-{earlier}" if earlier else kind
        for index, group in enumerate(optimizer.param_groups):
            if "lr" in group:  # an optimizer need not have one
                found[f"{name}/{index}" if index else name] = float(group["lr"])
    return found


def trust_ratios(optimizers: Sequence[Optimizer]) -> Tensor:
    """Last trust ratio of each parameter that adapts (LARS, LAMB), 1-D, on its way to the host;
    NaN without a step.
    """
    found: list[Tensor] = []
    for optimizer in optimizers:
        ratios = getattr(optimizer, "trust_ratios", None)
        if not isinstance(ratios, Tensor):
            continue
        adapts = [
            group.get("adapt", True) for group in optimizer.param_groups for _ in group["params"]
        ]
        places = torch.tensor(
            [place for place, adapt in enumerate(adapts) if adapt], dtype=torch.int64
        )
        chosen = ratios[places.to(ratios.device, non_blocking=True)]
        # the copy of all ranks' rows, which comes behind this one, is waited for
        if is_gpu(chosen.device):
            host = torch.empty(chosen.numel(), dtype=chosen.dtype, pin_memory=True)
            chosen = host.copy_(chosen, non_blocking=True)
        found.append(chosen)
    return torch.cat(found) if found else torch.empty(0)


class SkippedSteps:
    """Counts steps that a loss scaler left out, and adds what optimizers count themselves
    (``skip_nonfinite``).

    Without reading anything off the device: a step that `GradScaler` skips is one that was
    announced and not made.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Any) -> None:
        self._optimizers = optimizers
        self._scales = scaler is not None
        # steps: gradients are unscaled; and the optimizer has stepped
        self.announced = self._made = 0
        # where the optimizer itself looks at what the scaler found
        self._found: Tensor | None = None
        self._hooks = (
            [one.register_step_post_hook(self._step_made) for one in optimizers]
            if self._scales
            else []
        )

    def count(self) -> tuple[float, Tensor]:
        """What the host knows, and what has to be added (0-d, float64, on the device perhaps)."""
        known = float(self.announced - self._made) if self._scales else 0.0
        known += sum(getattr(one, "skipped_steps", 0) for one in self._optimizers)
        return known, torch.zeros((), dtype=torch.float64) if self._found is None else self._found

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _step_made(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._made += 1
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            found = (found > 0).sum().double()
            self._found = found if self._found is None else self._found + found
