"""The numbers of all ranks as one report: scalars under ``ring/`` and a line on the progress
bar.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_ring.monitor.rank_rows import RankRow, RowExchange

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
