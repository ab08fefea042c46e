"""The page: which tag goes into which section, and how much of it."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_ring.tools.report import charts, compare
from lightning_ring.tools.report.compare import Differences, Metric
from lightning_ring.tools.report.runs import Run, when

_MOST_PICTURE_BYTES = 6_000_000
_LEARNING_RATE = re.compile(r"(ring/)?lr[-/]|.*learning_rate")
_NOT_DRAWN = re.compile(r"epoch$|hp_metric$|best/|test")
_PARTS = ("forward", "backward", "exposed communication", "data", "optimizer", "copy", "other")  # in their colours


def write_page(runs: Sequence[Run], metric: Metric | None) -> str:
    """HTML of one run, or of a comparison, which is sorted by ``metric``."""
    given, runs = runs, metric.sorted(runs) if metric is not None else list(runs)
    first = {run.name for run in runs[: charts.NUM_LINES]}
    drawn = [run for run in given if run.name in first]  # so that colours do not depend on the metric
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"short": charts.short, "look": charts.look, "when": when, "duration": _duration}
    pictures, num_left_out = _pictures(drawn)
    return environment.get_template("page.html").render(
        runs=runs,
        drawn=drawn,
        numbers={run.name: number for number, run in enumerate(drawn)},
        places={run.name: place for place, run in enumerate(runs)},
        metric=metric,
        now=when(time.time()),
        settings=compare.settings(runs) if len(runs) > 1 else {},
        tests=_test_tags(runs),
        throughput={run.name: compare.throughput(run) for run in runs},
        charts=_charts(drawn, metric),
        bars=_bars(drawn),
        slowest={run.name: compare.slowest_ranks(run) for run in drawn},
        pictures=pictures,
        num_left_out=num_left_out,
        picture_megabytes=_MOST_PICTURE_BYTES // 1_000_000,
        config=Differences.of(runs, lambda run: run.config),
        environment=Differences.of(runs, lambda run: run.fits[-1].environment if run.fits else {}),
    )


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{seconds:.1f} s"
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _test_tags(runs: Sequence[Run]) -> list[str]:
    tags = dict.fromkeys(tag for run in runs for tag in run.scalars if tag.startswith("test"))
    return [tag for tag in tags if not tag.endswith("images")]


# -- curves


def _charts(runs: Sequence[Run], metric: Metric | None) -> dict[str, list[Markup]]:
    """The charts under each heading: ``main`` and ``more`` curves, the ``machine``, the ``ranks``."""
    groups: dict[str, list[str]] = {}
    for tag in dict.fromkeys(tag for run in runs for tag in run.scalars):
        groups.setdefault(_group(tag), []).append(tag)
    training = sorted(groups.get("training", []), key=lambda tag: ("loss" not in tag, len(tag)))
    compared = [metric.tag] if metric is not None else []
    throughput = list(dict.fromkeys(found[0] for run in runs if (found := compare.throughput(run))))
    first = dict.fromkeys([*training[:1], *compared, *throughput])
    main = [_chart(runs, tag) for tag in first]
    if len(runs) > 1:
        main[2:2] = [_chart_over_time(runs, tag) for tag in compared]
    rates = [_learning_rates(run) for run in runs]
    lines = [_line(number, run, found[0]) for number, (run, found) in enumerate(zip(runs, rates, strict=True)) if found]
    if lines:
        main.append(charts.line_chart("learning rate of the first parameter group", lines, "step"))
    more = [*training, *groups.get("validation", []), *dict.fromkeys(tag for found in rates for tag in found[1:])]
    ranks = [tag for tag in groups.get("ranks", []) if _changes(runs, tag)]
    return {
        "main": main,
        "more": [_chart(runs, tag) for tag in more if tag not in first],
        "machine": [_chart(runs, tag) for tag in groups.get("machine", []) if tag not in first],
        "ranks": [_chart(runs, tag) for tag in ranks],
    }


def _group(tag: str) -> str:
    if _NOT_DRAWN.match(tag):
        return "none"
    if _LEARNING_RATE.match(tag):
        return "learning rates"
    if tag.startswith("ring/"):
        return "ranks" if tag.endswith("world_size") else "machine"
    return "validation" if compare.VALIDATION.match(tag) else "training"


def _changes(runs: Sequence[Run], tag: str) -> bool:
    return any(len({point.value for point in run.scalars.get(tag, ())}) > 1 for run in runs)


def _learning_rates(run: Run) -> list[str]:
    """The tags of learning rates that differ: `LearningRateMonitor` and `RingMonitor` log each group's."""
    tags = [tag for tag in run.scalars if _LEARNING_RATE.match(tag)]
    ours = [tag for tag in tags if tag.startswith("ring/")]
    distinct = {tuple(point.value for point in run.scalars[tag]): tag for tag in reversed(ours or tags)}
    return list(reversed(distinct.values()))


def _line(number: int, run: Run, tag: str) -> charts.Line:
    return charts.Line(number, run.name, [(point.step, point.value) for point in run.scalars[tag]])


def _chart(runs: Sequence[Run], tag: str) -> Markup:
    lines = [_line(number, run, tag) for number, run in enumerate(runs) if tag in run.scalars]
    smooth = not tag.startswith("ring/") and not compare.VALIDATION.match(tag)
    return charts.line_chart(tag, lines, "step", log="loss" in tag.lower(), smooth=smooth)


def _chart_over_time(runs: Sequence[Run], tag: str) -> Markup:
    lines = [
        charts.Line(number, run.name, [(point.time - run.first_time, point.value) for point in run.scalars[tag]])
        for number, run in enumerate(runs)
        if tag in run.scalars
    ]
    title = f"{tag}, over time"
    return charts.line_chart(title, lines, "seconds since the first logged value", log="loss" in tag.lower())


# -- the step's time


def _bars(runs: Sequence[Run]) -> dict[str, Any]:
    """Parts of a step: a bar a run, or for a single run one a stretch of steps; widths in per cent of the longest."""
    if len(runs) == 1:
        rows = [("steps " + label, parts) for label, parts in compare.step_windows(runs[0])]
    else:
        rows = [(run.name, compare.step_parts(run)) for run in runs]
    rows = [(label, parts) for label, parts in rows if parts]
    found = {part for _, parts in rows for part in parts}
    names = [*[part for part in _PARTS if part in found], *sorted(found.difference(_PARTS))]
    longest = max((sum(parts.values()) for _, parts in rows), default=1.0) or 1.0
    return {
        "names": {name: (_PARTS.index(name) if name in _PARTS else len(_PARTS)) for name in names},
        "rows": [(label, parts, sum(parts.values())) for label, parts in rows],
        "longest": longest,
    }


# -- pictures


def _pictures(runs: Sequence[Run]) -> tuple[dict[str, list[dict[str, Any]]], int]:
    """By tag, while there is room, the first run's first; and the number that is left out."""
    room, num_left_out = _MOST_PICTURE_BYTES, 0
    found: dict[str, list[dict[str, Any]]] = {}
    for number, run in enumerate(runs):
        for tag, picture in sorted(run.pictures.items(), key=lambda item: _interest(item[0])):
            if len(picture.png) > room:
                num_left_out += 1
                continue
            room -= len(picture.png)
            data = base64.b64encode(picture.png).decode()
            found.setdefault(tag, []).append({"run": run, "number": number, "step": picture.step, "data": data})
    return dict(sorted(found.items(), key=lambda item: _interest(item[0]))), num_left_out


def _interest(tag: str) -> tuple[int, str]:
    words = ("nearest", "confusion", "ring/", "batch")
    return next((place for place, word in enumerate(words) if word in tag), len(words)), tag
