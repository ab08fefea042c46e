"""Reports on runs, one HTML page: what runs are compared by, and what the page's template shows."""

import base64
import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.report.charts import DASHES, NUM_COLOURS, NUM_LINES, bar_chart, line_chart
from lightning_ring.tools.report.runs import LoggedRun

_VALIDATION = re.compile(r"val|eval|dev(?![a-z])")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|mae|mse|nll", re.IGNORECASE)
_TELLING = re.compile(r"(ring/)?lr[-/]|.*learning_rate|ring/.*(images|samples|items)_per_second$")
_NOT_DRAWN = re.compile(r"epoch$|hp_metric$|best/|test")
# They overlap the parts of a step, or lie between two steps.
_NO_PART = re.compile(r"(^|_)(step|hidden|slowest|behind|standstill)(_|$)|^communication$")
# In their colours.
_PARTS = ("forward", "backward", "exposed communication", "data", "optimizer", "copy", "other")

Runs = Sequence[LoggedRun]


def write_page(given: Runs, asked: str | None = None) -> str:
    """HTML of one run, or of several, sorted by the metric that was ``asked`` for, or by what
    checkpoints go by. Raises `ConfigurationError`: no run logged ``asked``."""
    tag, sign = choose_metric(given, asked)
    best = {run.name: _best(run, tag, sign) for run in given}
    runs = sorted(given, key=lambda run: sign * best[run.name][1])
    # in the given order, so that colours do not depend on the metric
    drawn = [run for run in given if run in runs[:NUM_LINES]]
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined)
    environment.globals |= {"dashes": DASHES, "num_colours": NUM_COLOURS}
    shown = (settings, compared, samples_per_second, slowest_ranks, curves, step_time, short)
    environment.filters |= {function.__name__: function for function in shown} | {
        "when": lambda seconds: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)),
        "duration": lambda seconds: timedelta(seconds=round(seconds)),
        "base64": lambda data: base64.b64encode(data).decode(),
    }
    tests = [test for test in _tags(runs) if test.startswith("test") and test[-6:] != "images"]
    return environment.get_template("page.html").render(
        {"now": time.time(), "runs": runs, "drawn": drawn, "tag": tag, "best": best},
        lower_is_better=sign > 0,
        tests=tests,
        pictures=pictures(drawn),
    )


def choose_metric(runs: Runs, asked: str | None) -> tuple[str | None, int]:
    """A tag, and 1 where less is better, else -1. ``asked``, else what checkpoints go by, else a
    validation metric."""
    tags = _tags(runs)
    if asked and asked not in tags:
        of_users = ", ".join(tag for tag in tags if not tag.startswith("ring/"))
        raise ConfigurationError(
            f"--metric {asked}: no run logged it. Logged were: {of_users or 'no scalars'}."
        )
    found = [asked] if asked else [tag for tag in tags if _VALIDATION.match(tag)]
    if not found:
        return None, 1
    monitored = [run.config.get("callbacks.checkpoint.monitor") for run in runs]
    logged = Counter(chain.from_iterable(run.scalars for run in runs))
    tag = max(found, key=lambda tag: (monitored.count(tag), logged[tag]))
    lower = bool(_LOWER_IS_BETTER.search(tag))
    if tag in monitored:
        lower = any(run.config.get("callbacks.checkpoint.mode") != "max" for run in runs)
    return tag, 1 if lower else -1


def _best(run: LoggedRun, tag: str | None, sign: int) -> tuple[int | None, float]:
    """Step and value of the first of the best; the worst there can be where all are NaN."""
    points = [point for point in run.scalars.get(tag or "", ()) if not math.isnan(point.value)]
    best = min(points, key=lambda point: sign * point.value, default=None)
    return (best.step, best.value) if best else (None, sign * math.inf)


def _tags(runs: Runs) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(run.scalars for run in runs)))


def _finite(run: LoggedRun, tag: str) -> list[float]:
    return [point.value for point in run.scalars.get(tag, ()) if math.isfinite(point.value)]


# -- what the template shows


def compared(runs: Runs, attribute: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """What differs between runs, a value a run; and what is the same in all that have any."""
    values = [own for run in runs if (own := getattr(run, attribute))]
    differ, same = {}, {}
    for name in dict.fromkeys(chain.from_iterable(values)):
        row = [own.get(name, "–") for own in values]
        if len(set(row)) > 1:
            differ[name] = row
        else:
            same[name] = row[0]
    return differ, same


def settings(runs: Runs) -> Mapping[str, Sequence[str]]:
    """The first five that differ."""
    names = [name for name in compared(runs, "config")[0] if not name.startswith("ring/")]
    return {name: [run.config.get(name, "–") for run in runs] for name in names[:5]}


def step_parts(run: LoggedRun) -> dict[str, float]:
    """Mean milliseconds of each part of a step."""
    found = {}
    for tag in run.scalars:
        part = re.fullmatch(r"ring/(?:.*/)?(.+)_ms", tag)
        if part and not _NO_PART.search(part[1]) and (values := _finite(run, tag)):
            found[part[1].replace("_", " ")] = fmean(values)
    return found


def step_time(runs: Runs) -> tuple[Markup, list[str], Mapping[str, Mapping[str, float]]] | None:
    """A chart, its parts, and a row a run."""
    rows = {run.name: parts for run in runs if (parts := step_parts(run))}
    logged = sorted(set(chain.from_iterable(rows.values())))
    names = list(dict.fromkeys(part for part in (*_PARTS, *logged) if part in logged))
    return (bar_chart(rows, names), names, rows) if rows else None


def slowest_ranks(run: LoggedRun) -> list[tuple[int, float, float]]:
    """Rank, the share of logged steps in which it was slowest, and median ms behind in them."""
    behind = {
        int(found[1]): [point.value for point in points]
        for tag, points in run.scalars.items()
        if (found := re.fullmatch(r"ring/slowest_rank_behind_ms/rank_(\d{1,9})", tag))
    }
    num_steps = sum(map(len, behind.values()))
    rows = [(rank, len(ms) / num_steps, median(ms)) for rank, ms in behind.items()]
    return sorted(rows, key=lambda row: -row[1])


def samples_per_second(run: LoggedRun) -> float | None:
    """The median, of all ranks together."""
    values = _finite(run, "ring/images_per_second")
    return median(values) if values else None


def short(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e5 else f"{value:.4g}"


def curves(runs: Runs, metric: str | None) -> list[list[Markup]]:
    """The most telling ones, and the other ones, those of the step and the machine last."""
    tags = [tag for tag in _tags(runs) if not _NOT_DRAWN.match(tag)]
    tags.sort(key=lambda tag: (tag.startswith("ring/"), "loss" not in tag))
    first = [tag for tag in tags if not _VALIDATION.match(tag)][:1]
    first += [metric] if metric else []
    telling = dict.fromkeys([*first, *filter(_TELLING.match, tags)])
    others = [tag for tag in tags if tag not in telling]
    return [[_chart(runs, tag) for tag in group] for group in (telling, others)]


def _chart(runs: Runs, tag: str) -> Markup:
    lines = {
        number: [(point.step, point.value) for point in run.scalars[tag]]
        for number, run in enumerate(runs)
        if tag in run.scalars
    }
    return line_chart(tag, lines)


def pictures(runs: Runs) -> list[tuple[str, int, Any]]:
    """Tag, number of the run, picture; nearest neighbours and confusions first."""
    found = [
        (tag, number, picture)
        for number, run in enumerate(runs)
        for tag, picture in run.pictures.items()
    ]
    return sorted(found, key=lambda one: ("nearest" not in one[0], *one[:2]))
