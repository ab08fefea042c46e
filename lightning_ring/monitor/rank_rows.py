"""The numbers of every rank for a logged step: one row a rank, in one small all-gather."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from lightning_ring.comm.communicator import Communicator, CompletedWork, Work, shard
from lightning_ring.comm.host_copy import HostCopy, on_host
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.monitor.step_record import StepTimes


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
