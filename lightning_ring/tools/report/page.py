"""The page: what runs are compared by, and what stands in which section."""

from __future__ import annotations

import base64
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.report import charts
from lightning_ring.tools.report.charts import short
from lightning_ring.tools.report.runs import LoggedRun, when

_VALIDATION = re.compile(r"val|eval|dev(?![a-z])")
_LOWER_IS_BETTER = re.compile(r"loss|error|perplexity|mae|mse|nll", re.IGNORECASE)
_LEARNING_RATE = re.compile(r"(ring/)?lr[-/]|.*learning_rate")
_NOT_DRAWN = re.compile(r"epoch$|hp_metric$|best/|test|.*world_size$")
# they overlap the parts of a step
_NO_PART = re.compile(r"(^|_)(step|hidden|slowest|behind)(_|$)|^communication$")
# in their colours
_PARTS = ("forward", "backward", "exposed communication", "data", "optimizer", "copy", "other")
_MOST_PICTURE_BYTES = 6_000_000
_NUM_STRETCHES = 10  # of a single run, whose steps' parts are compared
_MOST_SETTINGS = 5  # columns of the table of runs

Runs = Sequence[LoggedRun]


def write_page(given: Runs, asked: str | None = None) -> str:
    """HTML of one run, or of several, sorted by the metric that was ``asked`` for, or by what
    checkpoints go by.

    Raises `ConfigurationError`: no run logged ``asked``.
    """
    tag, sign = choose_metric(given, asked)
    best = {run.name: _best(run, tag, sign) for run in given}
    runs = sorted(given, key=lambda run: sign * best[run.name][1])
    first = {run.name for run in runs[: charts.NUM_LINES]}
    # in the given order, so that colours do not depend on the metric
    drawn = [run for run in given if run.name in first]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    order = f"Sorted by the best {tag} ({'lower' if sign > 0 else 'higher'} is better)."
    no_config = "no .hydra/config.yaml or hparams.yaml is there"
    sections = {
        "Runs": _table_of_runs(runs, drawn, tag, best),
        "Curves": _curves(drawn, tag),
        "Step time": _step_time(drawn),
        "Ranks": _ranks(runs, drawn),
        "Pictures": _pictures(drawn),
        "Configuration": _comparison(runs, lambda run: run.config, no_config),
        "Environment": _comparison(
            runs, lambda run: run.environment, "RingMonitor records it in a fit"
        ),
    }
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        now=when(time.time()),
        order=order if tag and len(runs) > 1 else "",
        drawn=drawn,
        key=charts.key,
        sections=sections,
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
    monitored = [run.config.get("callbacks.checkpoint.monitor") for run in runs]
    found = [asked] if asked is not None else [tag for tag in tags if _VALIDATION.match(tag)]
    if not found:
        return None, 1
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


def settings(runs: Runs) -> dict[str, list[str]]:
    """What differs: what the command lines set, else the first of the configurations'."""
    given = {name for run in runs for name in run.overrides}
    values = [{**run.overrides, **run.config} for run in runs]
    rows = {name: [one.get(name, "–") for one in values] for one in values for name in one}
    differ = [name for name, row in rows.items() if len(set(row)) > 1 and name[:5] != "ring/"]
    chosen = [name for name in differ if name in given] or differ
    return {name: rows[name] for name in chosen[:_MOST_SETTINGS]}


def step_parts(run: LoggedRun, steps: Iterable[int] | None = None) -> dict[str, float]:
    """Mean milliseconds of each part of a step, over the logged ``steps``."""
    chosen, found = None if steps is None else set(steps), {}
    for tag, points in run.scalars.items():
        part = re.fullmatch(r"ring/(?:.*/)?(.+)_ms", tag)
        if part is None or _NO_PART.search(part[1]):
            continue
        logged = [point.value for point in points if chosen is None or point.step in chosen]
        values = [value for value in logged if math.isfinite(value)]
        if values:
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


def _throughput(run: LoggedRun) -> dict[str, float]:
    """By tag the median of samples a second of all ranks."""
    found = {}
    for tag, points in run.scalars.items():
        values = [point.value for point in points if math.isfinite(point.value)]
        if re.fullmatch(r"ring/.*(images|samples|items)_per_second", tag) and values:
            found[tag] = statistics.median(values)
    return found


def _tags(runs: Runs) -> list[str]:
    return list(dict.fromkeys(tag for run in runs for tag in run.scalars))


# -- sections


def _joined(pattern: str, items: Iterable[Any]) -> Markup:
    return Markup("").join(Markup(pattern).format(item) for item in items)


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    body = _joined("<tr>{}</tr>", (_joined("<td>{}</td>", row) for row in rows))
    names = _joined('<th scope="col">{}</th>', head)
    table = '<div class="scroll"><table><tr>{}</tr>{}</table></div>'
    return Markup(table).format(names, body)


def _text(text: str) -> Markup:
    return Markup("<p>{}</p>").format(text)


def _folded(summary: str, content: Markup, *, unfolded: bool = False) -> Markup:
    is_open = Markup(" open") if unfolded else ""
    details = Markup("<details{}><summary>{}</summary>{}</details>")
    return details.format(is_open, summary, content)


def _table_of_runs(
    runs: Runs, drawn: Runs, tag: str | None, best: Mapping[str, tuple[int | None, float]]
) -> list[Markup]:
    tests = [tag for tag in _tags(runs) if tag.startswith("test") and not tag.endswith("images")]
    differ = settings(runs)
    head = ["run", *differ, *([f"best {tag}", "at step", "last"] if tag else []), *tests]
    rows = []
    for place, run in enumerate(runs):
        mark = charts.key(drawn.index(run)) if run in drawn and len(runs) > 1 else ""
        row = [Markup("{} {}").format(mark, run.name), *(each[place] for each in differ.values())]
        if tag:
            step, value = best[run.name]
            row += ["–", "–"] if step is None else [short(value), f"{step:,}"]
            row.append(short(run.last(tag)))
        row += [short(run.last(test)) for test in tests]
        seconds = "–" if run.seconds is None else str(timedelta(seconds=round(run.seconds)))
        speed = next(iter(_throughput(run).values()), None)
        rows.append([*row, seconds, short(speed), run.end])
    parts = [_table([*head, "time", "samples/s", "end"], rows)]
    if tag is None:
        named = "val..., eval..., dev..."
        parts.append(
            _text(f"No run logged a validation metric ({named}): --metric NAME chooses another.")
        )
    if len(drawn) < len(runs):
        shown = f"Charts and pictures show {len(drawn)} of {len(runs)} runs"
        parts.append(_text(f"{shown}, the first rows of this table."))
    return parts


def _curves(runs: Runs, metric: str | None) -> list[Markup]:
    tags = [tag for tag in _tags(runs) if not _NOT_DRAWN.match(tag)]
    rates = [tag for tag in tags if _LEARNING_RATE.match(tag)]
    machine = [tag for tag in tags if tag.startswith("ring/") and tag not in rates]
    others = [tag for tag in tags if tag not in rates and tag not in machine]
    training = [tag for tag in others if not _VALIDATION.match(tag)]
    training.sort(key=lambda tag: ("loss" not in tag, len(tag)))
    # LearningRateMonitor logs the same rates
    rates = [tag for tag in rates if tag.startswith("ring/")] or rates
    speeds = [tag for run in runs for tag in _throughput(run)]
    sizes = [tag for tag in _tags(runs) if tag.endswith("world_size") and _changes(runs, tag)]
    chosen = [*training[:1], *([metric] if metric else []), *speeds, *rates[:1], *sizes]
    main = dict.fromkeys(chosen)
    if not main:
        return [_text("No scalars were logged.")]
    more = [tag for tag in dict.fromkeys((*training, *others, *rates)) if tag not in main]
    machine = [tag for tag in machine if tag not in main]
    parts = [_charts(runs, main)]
    if more:
        single = len(runs) == 1
        parts.append(_folded(f"{len(more)} more curves", _charts(runs, more), unfolded=single))
    if machine:
        summary = f"{len(machine)} curves of the step and the machine"
        parts.append(_folded(summary, _charts(runs, machine)))
    return parts


def _changes(runs: Runs, tag: str) -> bool:
    return any(len({point.value for point in run.scalars.get(tag, ())}) > 1 for run in runs)


def _charts(runs: Runs, tags: Iterable[str]) -> Markup:
    drawn = []
    for tag in tags:
        lines = {
            number: [(point.step, point.value) for point in run.scalars[tag]]
            for number, run in enumerate(runs)
            if tag in run.scalars
        }
        drawn.append(charts.line_chart(tag, lines, "step", log="loss" in tag.lower()))
    return Markup('<div class="charts">{}</div>').format(_joined("{}", drawn))


def _step_time(runs: Runs) -> list[Markup]:
    """A row a run, or for a single run one a stretch of steps."""
    rows = [(run.name, step_parts(run)) for run in runs]
    if len(runs) == 1:
        steps = [point.step for point in runs[0].scalars.get("ring/step_ms", ())]
        size = math.ceil(len(steps) / _NUM_STRETCHES) or 1
        parts = [steps[start : start + size] for start in range(0, len(steps), size)]
        rows = [(f"steps {part[0]:,} to {part[-1]:,}", step_parts(runs[0], part)) for part in parts]
    rows = [(label, parts) for label, parts in rows if parts]
    if not rows:
        callback = "The callback lightning_ring.monitor.RingMonitor does."
        return [_text(f"Not recorded: no run logged step times. {callback}")]
    found = {part for _, parts in rows for part in parts}
    names = [*[part for part in _PARTS if part in found], *sorted(found.difference(_PARTS))]
    numbers = [
        [label, *(short(parts.get(name)) for name in names), short(sum(parts.values()))]
        for label, parts in rows
    ]
    colours = {name: min(place, len(_PARTS) - 1) for place, name in enumerate(names)}
    waits = "Exposed communication is the wait for other ranks and for the network."
    return [
        charts.bar_chart(rows, colours),
        _text(f"Means over all ranks. {waits}"),
        _folded("as numbers", _table(["ms", *names, "step"], numbers)),
    ]


def _ranks(runs: Runs, drawn: Runs) -> list[Markup]:
    rows = []
    for run in runs:
        for fit in run.fits[:-1]:
            ranks = fit.environment.get("ranks", "–")
            rows.append([run.name, when(fit.time), ranks, "", fit.end or "not recorded: killed"])
        began = when(run.fits[-1].time) if run.fits else "–"
        ranks = run.environment.get("ranks", run.result.get("ranks", "–"))
        last = when(run.last_time) if run.last_time else "–"
        rows.append([run.name, began, ranks, last, run.end])
    parts = [_table(["run", "fit began", "ranks", "last value logged", "end"], rows)]
    slowest = [
        [run.name, rank, f"{100 * share:.0f} % of logged steps", f"{short(behind)} ms"]
        for run in drawn
        for rank, share, behind in slowest_ranks(run)[:4]
    ]
    if slowest:
        own = "The slowest rank is the one whose own work takes longest, for which the others wait:"
        head = ["run", "rank", "slowest in", "then behind the others by (median)"]
        parts += [_text(own), _table(head, slowest)]
    return parts


def _pictures(runs: Runs) -> list[Markup]:
    """Nearest neighbours and confusions first, while there is room on the page."""
    room, figures, num_left_out = _MOST_PICTURE_BYTES, [], 0
    figure = Markup(
        "<figure><figcaption>{} {}, {}, step {:,}</figcaption>"
        '<img loading="lazy" alt="{}" src="data:image/png;base64,{}"></figure>'
    )
    tags = {tag for run in runs for tag in run.pictures}
    for tag in sorted(tags, key=lambda tag: ("nearest" not in tag, tag)):
        for number, run in enumerate(runs):
            picture = run.pictures.get(tag)
            if picture is None or len(picture.png) > room:
                num_left_out += picture is not None
                continue
            room -= len(picture.png)
            data, key = base64.b64encode(picture.png).decode(), charts.key(number)
            figures.append(figure.format(key, tag, run.name, picture.step, tag, data))
    if not figures and not num_left_out:
        return [_text("No images were logged.")]
    parts = [Markup('<div class="charts">{}</div>').format(_joined("{}", figures))]
    if num_left_out:
        room_in_all = f"a page holds {_MOST_PICTURE_BYTES // 1_000_000} MB of pictures"
        parts.append(_text(f"Left out, because {room_in_all}: {num_left_out}."))
    return parts


def _comparison(
    runs: Runs, values: Callable[[LoggedRun], Mapping[str, str]], missing: str
) -> list[Markup]:
    having = [run for run in runs if values(run)]
    names = dict.fromkeys(name for run in having for name in values(run))
    rows = {name: [values(run).get(name, "–") for run in having] for name in names}
    differ = [(name, *row) for name, row in rows.items() if len(set(row)) > 1]
    share = [(name, row[0]) for name, row in rows.items() if len(set(row)) == 1]
    parts = [_table(["", *(run.name for run in having)], differ)] if differ else []
    if share:
        summary = f"the same in all runs ({len(share)})"
        parts.append(_folded(summary, _table([], share), unfolded=len(share) < 20))
    if len(having) < len(runs):
        without = len(runs) - len(having)
        parts.append(_text(f"Not recorded by {without} of {len(runs)} runs: {missing}."))
    return parts
