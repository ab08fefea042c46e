"""What runs are compared by: a validation metric, their settings, and where their steps' time goes."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.report.runs import Point, Run

VALIDATION = re.compile(r"val|eval|dev(?![a-z])")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|mae|mse|nll", re.IGNORECASE)
# ring/..._ms that overlap the parts of a step
_NO_PART = re.compile(r"(^|_)(step|hidden|slowest|behind)(_|$)|^communication$")
NUM_WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Metric:
    tag: str
    lower_is_better: bool

    def best(self, run: Run) -> Point | None:
        """The first of the best; `None` where all values are NaN, or there are none."""
        points = [point for point in run.scalars.get(self.tag, ()) if not math.isnan(point.value)]
        sign = 1 if self.lower_is_better else -1
        return min(points, key=lambda point: sign * point.value, default=None)

    def sorted(self, runs: Sequence[Run]) -> list[Run]:
        """The best first, those without the metric last."""
        sign = 1 if self.lower_is_better else -1

        def place(run: Run) -> float:
            best = self.best(run)
            return math.inf if best is None else sign * best.value

        return sorted(runs, key=place)


def choose_metric(runs: Sequence[Run], asked: str | None) -> Metric | None:
    """``asked``, else what most runs' checkpoints go by, else the validation metric that most runs have.

    Raises `ConfigurationError`: no run logged ``asked``.
    """
    tags = list(dict.fromkeys(tag for run in runs for tag in run.scalars))
    if asked is not None and asked not in tags:
        of_users = ", ".join(tag for tag in tags if not tag.startswith("ring/"))
        raise ConfigurationError(f"--metric {asked}: no run logged it. Logged were: {of_users or 'no scalars'}.")
    monitored = [_monitored(run) for run in runs]
    candidates = [asked] if asked is not None else [tag for tag in tags if VALIDATION.match(tag)]
    if not candidates:
        return None
    tag = max(candidates, key=lambda tag: (monitored.count(tag), sum(tag in run.scalars for run in runs)))
    modes = [run.config.get("callbacks.checkpoint.mode", "min") for run in runs if _monitored(run) == tag]
    return Metric(tag, "min" in modes if modes else bool(_LOWER_IS_BETTER.search(tag)))


def _monitored(run: Run) -> str | None:
    return run.config.get("callbacks.checkpoint.monitor")


@dataclass(frozen=True, slots=True)
class Differences:
    """Named values of ``runs``: those that are the same in all, and for each other name one a run."""

    runs: Sequence[Run]
    shared: Mapping[str, str]
    different: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, runs: Sequence[Run], values: Callable[[Run], Mapping[str, str]]) -> Differences:
        """Between the runs that have such values."""
        having = [run for run in runs if values(run)]
        columns = [values(run) for run in having]
        names = dict.fromkeys(name for column in columns for name in column)
        rows = {name: [column.get(name, "–") for column in columns] for name in names}
        different = {name: row for name, row in rows.items() if len(set(row)) > 1}
        return cls(having, {name: row[0] for name, row in rows.items() if name not in different}, different)


def settings(runs: Sequence[Run], most: int = 5) -> Mapping[str, Sequence[str]]:
    """What differs, for the columns of a table: what the command lines set, else the first of the configurations'."""
    names = dict.fromkeys(name for run in runs for name in run.overrides)
    given = Differences.of(
        runs, lambda run: {name: run.config.get(name, run.overrides.get(name, "–")) for name in names}
    )
    configured = Differences.of(runs, lambda run: {"": "", **run.config})  # "": also of runs without configuration
    rows = given.different or {name: row for name, row in configured.different.items() if not name.startswith("ring/")}
    return dict(list(rows.items())[:most])


def step_parts(run: Run, first: float = -math.inf, last: float = math.inf) -> dict[str, float]:
    """Mean milliseconds of each part of a step, over the logged steps from ``first`` to ``last``."""
    found = {}
    for tag, points in run.scalars.items():
        part = re.fullmatch(r"ring/(?:.*/)?(.+)_ms", tag)
        values = [point.value for point in points if first <= point.step <= last and math.isfinite(point.value)]
        if part and not _NO_PART.search(part[1]) and values:
            found[part[1].replace("_", " ")] = statistics.fmean(values)
    return found


def step_windows(run: Run) -> Iterator[tuple[str, dict[str, float]]]:
    """`step_parts` of up to ten equal stretches of the logged steps."""
    steps = [point.step for point in run.scalars.get("ring/step_ms", ())]
    size = math.ceil(len(steps) / NUM_WINDOWS) or 1
    for start in range(0, len(steps), size):
        first, last = steps[start], steps[min(start + size, len(steps)) - 1]
        yield f"{first:,} to {last:,}" if last > first else f"{first:,}", step_parts(run, first, last)


def slowest_ranks(run: Run) -> list[tuple[int, float, float]]:
    """Rank, the share of logged steps in which it was the slowest, and its median milliseconds behind in them."""
    by_rank = {
        int(found[1]): [point.value for point in points]
        for tag, points in run.scalars.items()
        if (found := re.fullmatch(r"ring/slowest_rank_behind_ms/rank_(\d+)", tag))
    }
    num_steps = sum(map(len, by_rank.values()))
    rows = [(rank, len(times) / num_steps, statistics.median(times)) for rank, times in by_rank.items()]
    return sorted(rows, key=lambda row: -row[1])


def throughput(run: Run) -> tuple[str, float] | None:
    """Median samples a second of all ranks, and the tag."""
    for tag, points in run.scalars.items():
        values = [point.value for point in points if math.isfinite(point.value)]
        if re.fullmatch(r"ring/.*(images|samples|items)_per_second", tag) and values:
            return tag, statistics.median(values)
    return None
