"""The page: what runs are compared by, and what its template shows."""

from __future__ import annotations

import base64
import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.report import charts
from lightning_ring.tools.report.runs import LoggedRun

_VALIDATION = re.compile(r"val|eval|dev(?![a-z])")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|mae|mse|nll", re.IGNORECASE)
_LEARNING_RATE = re.compile(r"(ring/)?lr[-/]|.*learning_rate")
_THROUGHPUT = re.compile(r"ring/.*(images|samples|items)_per_second$")
_NOT_DRAWN = re.compile(r"epoch$|hp_metric$|best/|test|.*world_size$")
# they overlap the parts of a step
_NO_PART = re.compile(r"(^|_)(step|hidden|slowest|behind)(_|$)|^communication$")
# in their colours
_PARTS = ("forward", "backward", "exposed communication", "data", "optimizer", "copy", "other")
_MOST_PICTURE_BYTES = 6_000_000
_NUM_STRETCHES = 10  # of a single run, whose steps' parts are compared
_MOST_SETTINGS = 5  # columns of the table of runs

Runs = Sequence[LoggedRun]
Rows = Mapping[str, Sequence[str]]


def write_page(given: Runs, asked: str | None = None) -> str:
    """HTML of one run, or of several, sorted by the metric that was ``asked`` for, or by what
    checkpoints go by.

    Raises `ConfigurationError`: no run logged ``asked``.
    """
    tag, sign = choose_metric(given, asked)
    best = {run.name: _best(run, tag, sign) for run in given}
    runs = sorted(given, key=lambda run: sign * best[run.name][1])
    first = runs[: charts.NUM_LINES]
    # in the given order, so that colours do not depend on the metric
    drawn = [run for run in given if run in first]
    pictures = _pictures(drawn)
    sizes = accumulate(len(picture.encoded_image_string) for *_, picture in pictures)
    num_shown = sum(size <= _MOST_PICTURE_BYTES for size in sizes)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "short": short,
        "slowest_ranks": slowest_ranks,
        "when": lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)),
        "duration": lambda seconds: timedelta(seconds=round(seconds)),
        "base64": lambda data: base64.b64encode(data).decode(),
    }
    return environment.get_template("page.html").render(
        now=time.time(),
        runs=runs,
        drawn=drawn,
        key=charts.key,
        tag=tag,
        lower_is_better=sign > 0,
        best=best,
        settings=settings(runs),
        tests=[test for test in _tags(runs) if test.startswith("test") and test[-6:] != "images"],
        samples_per_second=samples_per_second,
        curves=_curves(drawn, tag),
        step_time=_step_time(drawn),
        pictures=pictures[:num_shown],
        num_left_out=len(pictures) - num_shown,
        most_megabytes=_MOST_PICTURE_BYTES // 1_000_000,
        configuration=_compared({run.name: run.config for run in runs}),
        environment=_compared({run.name: run.environment for run in runs}),
    )


def choose_metric(runs: Runs, asked: str | None) -> tuple[str | None, int]:
    """A tag, and 1 where less is better, else -1. ``asked``, else what checkpoints go by, else a
    validation metric.
    """
    tags = _tags(runs)
    if asked is not None and asked not in tags:
        of_users = ", ".join(tag for tag in tags if not tag.startswith("ring/"))
        raise ConfigurationError(
            f"--metric {asked}: no run logged it. Logged were: {of_users or 'no scalars'}."
        )
    found = [asked] if asked is not None else [tag for tag in tags if _VALIDATION.match(tag)]
    if not found:
        return None, 1
    monitored = [run.config.get("callbacks.checkpoint.monitor") for run in runs]
    num_runs = {tag: sum(tag in run.scalars for run in runs) for tag in found}
    tag = max(found, key=lambda tag: (monitored.count(tag), num_runs[tag]))
    modes = [run.config.get("callbacks.checkpoint.mode", "min") for run in runs if tag in monitored]
    lower = "min" in modes if modes else bool(_LOWER_IS_BETTER.search(tag))
    return tag, 1 if lower else -1


def _best(run: LoggedRun, tag: str | None, sign: int) -> tuple[int | None, float]:
    """Step and value of the first of the best; the worst there can be where all are NaN."""
    points = [point for point in run.scalars.get(tag or "", ()) if not math.isnan(point.value)]
    if not points:
        return None, sign * math.inf
    best = min(points, key=lambda point: sign * point.value)
    return best.step, best.value


def settings(runs: Runs) -> Rows:
    """What differs: what the command lines set, else the first of the configurations'."""
    given = {name for run in runs for name in run.overrides}
    differ, _ = _compared({run.name: {**run.overrides, **run.config} for run in runs})
    names = [name for name in differ if not name.startswith("ring/")]
    chosen = [name for name in names if name in given] or names
    return {name: differ[name] for name in chosen[:_MOST_SETTINGS]}


def _compared(values: Mapping[str, Mapping[str, str]]) -> tuple[Rows, Mapping[str, str]]:
    """What differs between runs, by name a value a run; and what is the same in all that have
    any.
    """
    names = dict.fromkeys(name for own in values.values() for name in own)
    rows = {name: [own.get(name, "–") for own in values.values() if own] for name in names}
    differ = {name: row for name, row in rows.items() if len(set(row)) > 1}
    return differ, {name: row[0] for name, row in rows.items() if name not in differ}


def step_parts(run: LoggedRun, steps: Iterable[int] | None = None) -> dict[str, float]:
    """Mean milliseconds of each part of a step, over the logged ``steps``."""
    chosen, found = None if steps is None else set(steps), {}
    for tag, points in run.scalars.items():
        part = re.fullmatch(r"ring/(?:.*/)?(.+)_ms", tag)
        if part is None or _NO_PART.search(part[1]):
            continue
        logged = [point.value for point in points if chosen is None or point.step in chosen]
        if values := [value for value in logged if math.isfinite(value)]:
            found[part[1].replace("_", " ")] = statistics.fmean(values)
    return found


def slowest_ranks(run: LoggedRun) -> list[tuple[int, float, float]]:
    """Rank, the share of logged steps in which it was the slowest, and its median milliseconds
    behind in them.
    """
    behind = "ring/slowest_rank_behind_ms/rank_"
    by_rank = {
        int(tag.removeprefix(behind)): [point.value for point in points]
        for tag, points in run.scalars.items()
        if tag.startswith(behind)
    }
    num_steps = sum(map(len, by_rank.values()))
    rows = [(rank, len(ms) / num_steps, statistics.median(ms)) for rank, ms in by_rank.items()]
    return sorted(rows, key=lambda row: -row[1])


def samples_per_second(run: LoggedRun) -> float | None:
    """The median, of all ranks together."""
    for tag in filter(_THROUGHPUT.match, run.scalars):
        if values := [one.value for one in run.scalars[tag] if math.isfinite(one.value)]:
            return statistics.median(values)
    return None


def short(value: float | None) -> str:
    if value is None:
        return "–"
    size = abs(value)
    if not math.isfinite(value) or size == 0 or 1e-3 <= size < 1e5:
        return f"{value:,.4g}" if size < 1e4 else f"{value:,.0f}"
    return f"{value:.3g}"


def _tags(runs: Runs) -> list[str]:
    return list(dict.fromkeys(tag for run in runs for tag in run.scalars))


def _curves(runs: Runs, metric: str | None) -> list[list[Markup]]:
    """The most telling ones, the other ones, and those of the step and the machine."""
    tags = [tag for tag in _tags(runs) if not _NOT_DRAWN.match(tag)]
    rates = [tag for tag in tags if _LEARNING_RATE.match(tag)]
    # LearningRateMonitor logs the same rates
    rates = [tag for tag in rates if tag.startswith("ring/")] or rates
    machine = [tag for tag in tags if tag.startswith("ring/")]
    others = [tag for tag in tags if tag not in machine and not _LEARNING_RATE.match(tag)]
    training = [tag for tag in others if not _VALIDATION.match(tag)]
    training.sort(key=lambda tag: ("loss" not in tag, len(tag)))
    speeds = [tag for tag in tags if _THROUGHPUT.match(tag)]
    sizes = [tag for tag in _tags(runs) if tag.endswith("world_size") and _changes(runs, tag)]
    telling = [*training[:1], *([metric] if metric else []), *speeds, *rates[:1], *sizes]
    found: list[list[Markup]] = []
    drawn: set[str] = set()
    for group in (telling, [*training, *others, *rates], machine):
        found.append([_chart(runs, tag) for tag in dict.fromkeys(group) if tag not in drawn])
        drawn.update(group)
    return found


def _changes(runs: Runs, tag: str) -> bool:
    return any(len({point.value for point in run.scalars.get(tag, ())}) > 1 for run in runs)


def _chart(runs: Runs, tag: str) -> Markup:
    lines = {
        number: [(point.step, point.value) for point in run.scalars[tag]]
        for number, run in enumerate(runs)
        if tag in run.scalars
    }
    return charts.line_chart(tag, lines, log="loss" in tag.lower())


def _step_time(runs: Runs) -> tuple[Markup, list[str], Mapping[str, Mapping[str, float]]] | None:
    """A chart, and its parts and rows: one a run, or for a single run one a stretch of steps."""
    found = {run.name: step_parts(run) for run in runs}
    if len(runs) == 1:
        steps = [point.step for point in runs[0].scalars.get("ring/step_ms", ())]
        size = math.ceil(len(steps) / _NUM_STRETCHES) or 1
        parts = [steps[start : start + size] for start in range(0, len(steps), size)]
        found = {f"steps {part[0]:,} to {part[-1]:,}": step_parts(runs[0], part) for part in parts}
    rows = {label: parts for label, parts in found.items() if parts}
    logged = {part for parts in rows.values() for part in parts}
    names = [*(part for part in _PARTS if part in logged), *sorted(logged.difference(_PARTS))]
    return (charts.bar_chart(rows, names), names, rows) if rows else None


def _pictures(runs: Runs) -> list[tuple[str, int, Any]]:
    """Tag, number of the run, picture; nearest neighbours and confusions first."""
    tags = {tag for run in runs for tag in run.pictures}
    return [
        (tag, number, run.pictures[tag])
        for tag in sorted(tags, key=lambda tag: ("nearest" not in tag, tag))
        for number, run in enumerate(runs)
        if tag in run.pictures
    ]
