"""The numbers of all ranks as one report: scalars under ``ring/`` and a line on the progress
bar.
"""

from __future__ import annotations

import math
import mmap
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator, CompletedWork
from lightning_ring.comm.host_copy import HostCopy
from lightning_ring.host.accelerator import gpu_module, is_gpu, send
from lightning_ring.monitor.step_times import PHASES, StepTimes

PERCENTILES = (5, 50, 95)


class RankMemory(NamedTuple):
    """Bytes that a rank holds. The GPU allocator's are zero on a CPU."""

    # this process's, without its data-loading workers; 0 where the system does not tell
    resident: float = 0.0
    allocated: float = 0.0  # tensors on the device
    reserved: float = 0.0  # held by the allocator
    peak: float = 0.0  # largest ``allocated`` since the process started, or since a reset

    @classmethod
    def now(cls, device: torch.device) -> RankMemory:
        statm = Path("/proc/self/statm")
        pages = int(statm.read_text().split()[1]) if statm.exists() else 0
        resident = pages * mmap.PAGESIZE
        if not is_gpu(device):
            return cls(resident)
        gpu = gpu_module(device)
        allocated, peak = gpu.memory_allocated(device), gpu.max_memory_allocated(device)
        return cls(resident, allocated, gpu.memory_reserved(device), peak)


class RankRow(NamedTuple):
    """One rank's numbers since the last logged step."""

    rank: int
    skipped: float  # steps that a loss scaler left out since training began
    times: StepTimes  # means over the steps, on CUDA over the steps that the device has finished
    memory: RankMemory

    def as_list(self) -> list[float]:
        return [self.rank, self.skipped, *self.times, *self.memory]

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> RankRow:
        times, memory = numbers[2:_MEMORY], numbers[_MEMORY:]
        return cls(int(numbers[0]), numbers[1], StepTimes(*times), RankMemory(*memory))


# where in a row a rank's memory begins, and where the row ends
_MEMORY = 2 + len(StepTimes._fields)
_END = _MEMORY + len(RankMemory._fields)


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
        return sum(row.times.images for row in self.rows) / (seconds or math.nan)

    @property
    def data_share(self) -> float:
        """Of a step of the slowest rank, spent waiting for data: that of others holds nobody up."""
        times = self.rows[self.slowest[0]].times
        return times.data / (times.total or math.nan)

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
        own = [row.times.own for row in self.rows]
        slowest = max(own)
        place = own.index(slowest)
        del own[place]
        return place, slowest - statistics.median(own) if own else 0.0

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second, on the rank whose collectives took least: the others' times hold
        waiting for a slow rank.
        """
        times = [row.times for row in self.rows]
        return max((one.sent / one.busy for one in times if one.busy > 0), default=0.0)

    def scalars(self) -> dict[str, float]:
        """By name; what cannot be told is left out.

        In units and digits with which TensorBoard's ticks differ: it writes three digits. The
        slowest rank is in the name of a scalar, because TensorBoard would smooth a rank's number.
        """
        # unlike `max`, this is NaN where one of them is
        held = torch.tensor([row.memory for row in self.rows], dtype=torch.float64)
        memory, *cuda = [round(size / 1e9, 2) for size in held.amax(0).tolist()]
        found = {"memory_gb": memory, "skipped_steps": self.skipped}
        if cuda[1] > 0:
            names = ("cuda_allocated_gb", "cuda_reserved_gb", "cuda_peak_gb")
            found |= zip(names, cuda, strict=True)
        found |= {f"lr/{name}": lr for name, lr in self.learning_rates.items()}
        if self._timed:
            found |= self._times()
        if self.trust_ratios.numel():
            at = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
            ratios = torch.quantile(self.trust_ratios.double(), at).tolist()
            for percent, ratio in zip(PERCENTILES, ratios, strict=True):
                found[f"trust_ratio/p{percent:02d}"] = ratio
        found = {name: number for name, number in found.items() if not math.isnan(number)}
        for number, norm in enumerate(self.gradient_norms):
            # one that is not finite is news
            if norm is not None:
                several = f"/{number}" if len(self.gradient_norms) > 1 else ""
                found[f"gradient_norm{several}"] = norm
        return {f"ring/{name}": number for name, number in found.items()}

    def _times(self) -> dict[str, float]:
        parts = {part: part for part in (*PHASES, "other")}
        parts |= {"step": "total", "exposed_communication": "exposed"}
        if self._communicates:
            parts |= {"communication": "busy", "hidden_communication": "hidden"}
        found = {f"{name}_ms": self._mean(part) * 1e3 for name, part in parts.items()}
        found["images_per_second"] = self.images_per_second
        found["images_per_second_per_rank"] = self.images_per_second / len(self.rows)
        found["data_ms_slowest"] = max(row.times.data for row in self.rows) * 1e3
        found["data_share"] = self.data_share
        if self._communicates:
            found["communication_share"] = self.communication_share
            found["bus_bandwidth_gb_per_s"] = self.bus_bandwidth / 1e9
            found["sent_mb_per_step"] = float(f"{self._mean('sent') / 1e6:.2g}")
        if len(self.rows) > 1:
            rank, behind = self.slowest
            found[f"slowest_rank_behind_ms/rank_{rank}"] = behind * 1e3
        return found

    def bar(self) -> dict[str, str]:
        """For a progress bar: short names and texts, which all bars show as they are."""
        shown: dict[str, str] = {}
        if not self._timed:
            return shown
        if math.isfinite(self.images_per_second):
            shown["img/s"] = f"{self.images_per_second:.0f}"
        shown["data"] = f"{self.data_share:.0%}"
        if self._communicates:
            shown["comm"] = f"{self.communication_share:.0%}"
        if len(self.rows) > 1:
            rank, behind = self.slowest
            shown["slowest"] = f"rank {rank} +{behind * 1e3:.0f} ms"
        return shown

    @property
    def _timed(self) -> bool:
        return all(row.times.steps for row in self.rows)

    @property
    def _communicates(self) -> bool:
        return any(row.times.busy > 0 for row in self.rows)

    def _mean(self, part: str) -> float:
        return sum(getattr(row.times, part) for row in self.rows) / len(self.rows)


class RowExchange:
    """An all-gather of every rank's row, under way; before `table` nothing waits for it, nor for
    the device.

    ``further`` numbers (0-d, float64) may lie on the device; there are as many on all ranks.
    """

    def __init__(
        self,
        comm: Communicator | None,
        row: RankRow,
        further: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        numbers = send(torch.tensor(row.as_list(), dtype=torch.float64), device)
        others = [number.to(numbers.device, non_blocking=True) for number in further]
        numbers = torch.cat([numbers, torch.stack(others)])
        self._width = numbers.numel()
        # all of it is this rank's until the others' shards arrive
        self._flat = numbers.repeat(comm.world_size if comm else 1)
        self._comm = comm
        self._work: Any = CompletedWork()
        if comm and comm.world_size > 1:
            self._work = comm.all_gather_(self._flat, name="monitor")

    def done(self) -> bool:
        """Whether `table` would return at once."""
        return self._work.done() and self._copy.ready()

    def table(self) -> Tensor:
        """Block until all ranks' numbers are on the host; a row a rank. Raises `RingError`: as
        `Work.wait`.
        """
        return self._copy.value().view(-1, self._width)

    @cached_property
    def _copy(self) -> HostCopy:
        self._work.wait()
        return HostCopy(self._flat, self._comm.wait_until if self._comm else None)


# a squared norm of gradients that did not step; so is its sum with what other ranks have
UNKNOWN = torch.tensor(-math.inf, dtype=torch.float64)


@dataclass(slots=True)
class LoggedStep:
    """A logged step, until all ranks' rows are here: a table, a row a rank, or still under way."""

    step: int
    learning_rates: dict[str, float]
    trust_ratios: Tensor
    rows: RowExchange | Tensor

    def arrived(self) -> bool:
        return isinstance(self.rows, Tensor) or self.rows.done()

    def wait(self) -> Tensor:
        """Block until it has arrived. Raises `RingError`: as `Work.wait`."""
        if not isinstance(self.rows, Tensor):
            self.rows = self.rows.table()
        return self.rows

    def report(self) -> RingReport:
        """After `wait`."""
        table = self.wait()
        rows = sorted(map(RankRow.from_list, table[:, :_END].tolist()), key=lambda row: row.rank)
        uncounted, *squares = table[:, _END:].sum(0).tolist()
        norms = [None if square < 0 else math.sqrt(square) for square in squares]
        # all ranks skip the same steps
        skipped = rows[0].skipped + uncounted / len(rows)
        ratios = self.trust_ratios[~self.trust_ratios.isnan()]
        return RingReport(self.step, rows, norms, skipped, self.learning_rates, ratios)


def gradient_squares(strategy: Any, optimizer: Optimizer) -> Tensor:
    """What this rank adds to the squared norm of the optimizer's gradients (0-d, float64).

    Under other strategies than ours what this rank holds.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if hasattr(strategy, "gradient_squares"):
        squares: Tensor = strategy.gradient_squares(params)
        return squares
    grads = [param.grad for param in params if param.grad is not None]
    return torch.nn.utils.get_total_norm(grads).double().square()


def learning_rates(optimizers: Sequence[Optimizer]) -> dict[str, float]:
    """Of each parameter group: ``SGD``, or ``SGD/1`` for the second group, ``SGD-1`` for the
    second SGD.
    """
    found = {}
    seen = Counter[str]()
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        name = f"{kind}-{seen[kind]}" if seen[kind] else kind
        seen[kind] += 1
        for index, group in enumerate(optimizer.param_groups):
            # an optimizer need not have one
            if "lr" in group:
                found[f"{name}/{index}" if index else name] = float(group["lr"])
    return found


def trust_ratios(optimizers: Sequence[Optimizer]) -> Tensor:
    """Last trust ratio of each parameter that adapts (LARS, LAMB), 1-D, on its way to the host;
    NaN without a step.
    """
    found = [torch.empty(0)]
    for optimizer in optimizers:
        if isinstance(ratios := getattr(optimizer, "trust_ratios", None), Tensor):
            groups = optimizer.param_groups
            adapts = [group.get("adapt", True) for group in groups for _ in group["params"]]
            places = torch.tensor(adapts, dtype=torch.bool).nonzero().flatten()
            index = places.to(ratios.device, non_blocking=True)
            # the copy of all ranks' rows, which comes after this one, is waited for
            found.append(ratios[index].to("cpu", non_blocking=True))
    return torch.cat(found)


class SkippedSteps:
    """Counts steps that a loss scaler left out, and adds what optimizers count themselves
    (``skip_nonfinite``).

    Without reading anything off the device: a step that `GradScaler` skips is one that was
    announced and not made.
    """

    def __init__(self, optimizers: Sequence[Optimizer], scaler: Any) -> None:
        self._optimizers = optimizers
        scaled = optimizers if scaler else ()
        # steps: gradients are unscaled; and the optimizer has stepped
        self.announced = self._made = 0
        # where the optimizer itself looks at what the scaler found
        self._found = torch.zeros((), dtype=torch.float64)
        self._hooks = [one.register_step_post_hook(self._step_made) for one in scaled]

    def count(self) -> tuple[float, Tensor]:
        """What the host knows, and what has to be added (0-d, float64, on the device perhaps)."""
        known = self.announced - self._made if self._hooks else 0
        return known + sum(
            getattr(one, "skipped_steps", 0) for one in self._optimizers
        ), self._found

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _step_made(self, optimizer: Optimizer, *_: Any) -> None:
        self._made += 1
        found = getattr(optimizer, "found_inf", None)
        if isinstance(found, Tensor):
            self._found = self._found.to(found.device, non_blocking=True) + (found > 0).sum()
