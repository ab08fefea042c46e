"""The page: what runs are compared by, and what stands in which section."""

from __future__ import annotations

import base64
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_NOT_DRAWN = re.compile(r"epoch$|hp_metric$|best/|test")
# they overlap the parts of a step
_NO_PART = re.compile(r"(^|_)(step|hidden|slowest|behind)(_|$)|^communication$")
# in their colours
_PARTS = ("forward", "backward", "exposed communication", "data", "optimizer", "copy", "other")
_MOST_PICTURE_BYTES = 6_000_000
_NUM_STRETCHES = 10  # of a single run, whose steps' parts are compared
_MOST_SETTINGS = 5  # columns of the table of runs


def write_page(runs: Sequence[LoggedRun], asked: str | None = None) -> str:
    """HTML of one run, or of several, sorted by the metric that was ``asked`` for, or by what
    checkpoints go by.

    Raises `ConfigurationError`: no run logged ``asked``.
    """
    tag, sign = choose_metric(runs, asked)
    best: dict[str, Sequence[Any]] = {run.name: _best(run, tag, sign) for run in runs}
    given, runs = (
        runs,
        sorted(runs, key=lambda run: sign * best[run.name][1] if best[run.name] else math.inf),
    )
    first = {run.name for run in runs[: charts.NUM_LINES]}
    # so that colours do not depend on the metric
    drawn = [run for run in given if run.name in first]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
    )
    by_tag = f"Sorted by the best {tag} ({'lower' if sign > 0 else 'higher'} is better)."
    return environment.get_template("page.html").render(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        now=when(time.time()),
        order=by_tag if tag and len(runs) > 1 else "",
        drawn=drawn,
        key=charts.key,
        sections={
            "Runs": _table_of_runs(runs, drawn, tag, best),
            "Curves": _curves(drawn, tag),
            "Step time": _step_time(drawn),
            "Ranks": _ranks(runs, drawn),
            "Pictures": _pictures(drawn),
            "Configuration": _comparison(
                runs, lambda run: run.config, "no .hydra/config.yaml or hparams.yaml is there"
            ),
            "Environment": _comparison(
                runs,
                lambda run: run.fits[-1].environment if run.fits else {},
                "RingMonitor records it in a fit",
            ),
        },
    )


def choose_metric(runs: Sequence[LoggedRun], asked: str | None) -> tuple[str | None, int]:
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
    candidates = [asked] if asked is not None else [tag for tag in tags if _VALIDATION.match(tag)]
    if not candidates:
        return None, 1
    tag = max(
        candidates, key=lambda tag: (monitored.count(tag), sum(tag in run.scalars for run in runs))
    )
    modes = [run.config.get("callbacks.checkpoint.mode", "min") for run in runs if tag in monitored]
    lower = "min" in modes if modes else bool(_LOWER_IS_BETTER.search(tag))
    return tag, 1 if lower else -1


def _best(run: LoggedRun, tag: str | None, sign: int) -> Sequence[Any]:
    """Step and value of the first of the best; nothing where all are NaN."""
    points = [
        (point.step, point.value)
        for point in run.scalars.get(tag or "", ())
        if not math.isnan(point.value)
    ]
    return min(points, key=lambda point: sign * point[1], default=())


def compared(
    runs: Sequence[LoggedRun], values: Callable[[LoggedRun], Mapping[str, str]]
) -> tuple[list[LoggedRun], dict[str, list[str]]]:
    """The runs that have such values, and for each name one value a run."""
    having = [run for run in runs if values(run)]
    names = dict.fromkeys(name for run in having for name in values(run))
    return having, {name: [values(run).get(name, "–") for run in having] for name in names}


def settings(runs: Sequence[LoggedRun]) -> dict[str, list[str]]:
    """What differs: what the command lines set, else the first of the configurations'."""
    overrides = {name for run in runs for name in run.overrides}
    # "": of a run without configuration
    _, rows = compared(runs, lambda run: {"": "", **run.overrides, **run.config})
    differ = {
        name: row
        for name, row in rows.items()
        if len(set(row)) > 1 and not name.startswith("ring/")
    }
    given = {name: row for name, row in differ.items() if name in overrides}
    return dict(list((given or differ).items())[:_MOST_SETTINGS])


def step_parts(
    run: LoggedRun, first: float = -math.inf, last: float = math.inf
) -> dict[str, float]:
    """Mean milliseconds of each part of a step, over the logged steps from ``first`` to
    ``last``.
    """
    found = {}
    for tag, points in run.scalars.items():
        part = re.fullmatch(r"ring/(?:.*/)?(.+)_ms", tag)
        values = [
            point.value
            for point in points
            if first <= point.step <= last and math.isfinite(point.value)
        ]
        if part and not _NO_PART.search(part[1]) and values:
            found[part[1].replace("_", " ")] = statistics.fmean(values)
    return found


def slowest_ranks(run: LoggedRun) -> list[tuple[int, float, float]]:
    """Rank, the share of logged steps in which it was the slowest, and its median milliseconds
    behind in them.
    """
    found = {
        tag: re.fullmatch(r"ring/slowest_rank_behind_ms/rank_(\d+)", tag) for tag in run.scalars
    }
    by_rank = {
        int(rank[1]): [point.value for point in run.scalars[tag]]
        for tag, rank in found.items()
        if rank
    }
    num_steps = sum(map(len, by_rank.values()))
    rows = [
        (rank, len(times) / num_steps, statistics.median(times)) for rank, times in by_rank.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


def _throughput(run: LoggedRun) -> tuple[str, float] | tuple[None, None]:
    """The tag and the median of samples a second of all ranks."""
    for tag, points in run.scalars.items():
        values = [point.value for point in points if math.isfinite(point.value)]
        if re.fullmatch(r"ring/.*(images|samples|items)_per_second", tag) and values:
            return tag, statistics.median(values)
    return None, None


def _tags(runs: Iterable[LoggedRun]) -> list[str]:
    return list(dict.fromkeys(tag for run in runs for tag in run.scalars))


# -- sections


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Markup:
    cells = [
        Markup("<tr>{}</tr>").format(Markup("").join(map(Markup("<td>{}</td>").format, row)))
        for row in rows
    ]
    names = Markup("").join(map(Markup('<th scope="col">{}</th>').format, head))
    return Markup('<div class="scroll"><table><tr>{}</tr>{}</table></div>').format(
        names, Markup("").join(cells)
    )


def _text(text: str, *values: Any) -> Markup:
    return Markup("<p>{}</p>").format(text.format(*values))


def _folded(summary: str, content: Markup, *, unfolded: bool = False) -> Markup:
    return Markup("<details{}><summary>{}</summary>{}</details>").format(
        Markup(" open") if unfolded else "", summary, content
    )


def _table_of_runs(
    runs: Sequence[LoggedRun],
    drawn: Sequence[LoggedRun],
    tag: str | None,
    best: Mapping[str, Sequence[Any]],
) -> list[Markup]:
    tests = [
        name for name in _tags(runs) if name.startswith("test") and not name.endswith("images")
    ]
    differ = settings(runs) if len(runs) > 1 else {}
    head = [
        "run",
        *differ,
        *([f"best {tag}", "at step", "last"] if tag else []),
        *tests,
        "time",
        "samples/s",
        "end",
    ]
    rows = []
    for place, run in enumerate(runs):
        name = Markup("{} {}").format(
            charts.key(drawn.index(run)) if run in drawn and len(runs) > 1 else "", run.name
        )
        step, value = best[run.name] or (None, None)
        found = (
            [short(value), "–" if step is None else f"{step:,}", short(run.last(tag))]
            if tag
            else []
        )
        ends = [_duration(run.seconds), short(_throughput(run)[1]), run.end]
        rows.append(
            [
                name,
                *(row[place] for row in differ.values()),
                *found,
                *(short(run.last(t)) for t in tests),
                *ends,
            ]
        )
    parts = [_table(head, rows)]
    if tag is None:
        parts.append(
            _text(
                "No run logged a validation metric (val..., eval..., dev...): --metric NAME "
                "chooses another."
            )
        )
    if len(drawn) < len(runs):
        parts.append(
            _text(
                "Charts and pictures show {} of {} runs, the first rows of this table.",
                len(drawn),
                len(runs),
            )
        )
    return parts


def _duration(seconds: float | None) -> str:
    if seconds is None or seconds < 60:
        return "–" if seconds is None else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def _curves(runs: Sequence[LoggedRun], metric: str | None) -> list[Markup]:
    groups: dict[str, list[str]] = {
        "training": [],
        "validation": [],
        "learning rates": [],
        "machine": [],
    }
    for tag in _tags(runs):
        groups.setdefault(_group(tag), []).append(tag)
    training = sorted(groups["training"], key=lambda tag: ("loss" not in tag, len(tag)))
    rates = groups["learning rates"]
    # LearningRateMonitor logs the same
    rates = [tag for tag in rates if tag.startswith("ring/")] or rates
    main = dict.fromkeys(
        filter(None, [*training[:1], metric, *(_throughput(run)[0] for run in runs), *rates[:1]])
    )
    if not main:
        return [_text("No scalars were logged.")]
    more = [tag for tag in (*training, *groups["validation"], *rates) if tag not in main]
    machine = [tag for tag in groups["machine"] if tag not in main]
    parts = [_charts(runs, main)]
    if more:
        parts.append(
            _folded(f"{len(more)} more curves", _charts(runs, more), unfolded=len(runs) == 1)
        )
    if machine:
        parts.append(
            _folded(f"{len(machine)} curves of the step and the machine", _charts(runs, machine))
        )
    return parts


def _group(tag: str) -> str:
    if _NOT_DRAWN.match(tag) or tag.endswith("world_size"):
        return "none"
    if _LEARNING_RATE.match(tag):
        return "learning rates"
    return (
        "machine"
        if tag.startswith("ring/")
        else "validation"
        if _VALIDATION.match(tag)
        else "training"
    )


def _charts(runs: Sequence[LoggedRun], tags: Iterable[str]) -> Markup:
    drawn = []
    for tag in tags:
        lines = {number: run.scalars[tag] for number, run in enumerate(runs) if tag in run.scalars}
        points = {
            number: [(point.step, point.value) for point in line] for number, line in lines.items()
        }
        drawn.append(charts.line_chart(tag, points, "step", log="loss" in tag.lower()))
    return Markup('<div class="charts">{}</div>').format(Markup("").join(drawn))


def _step_time(runs: Sequence[LoggedRun]) -> list[Markup]:
    """A row a run, or for a single run one a stretch of steps."""
    rows = [(run.name, step_parts(run)) for run in runs]
    if len(runs) == 1:
        steps = [point.step for point in runs[0].scalars.get("ring/step_ms", ())]
        size = math.ceil(len(steps) / _NUM_STRETCHES) or 1
        ends = [
            (steps[start], steps[min(start + size, len(steps)) - 1])
            for start in range(0, len(steps), size)
        ]
        rows = [
            (f"steps {first:,} to {last:,}", step_parts(runs[0], first, last))
            for first, last in ends
        ]
    rows = [(label, parts) for label, parts in rows if parts]
    if not rows:
        return [
            _text(
                "Not recorded: no run logged step times. The callback "
                "lightning_ring.monitor.RingMonitor does."
            )
        ]
    found = {part for _, parts in rows for part in parts}
    names = [*[part for part in _PARTS if part in found], *sorted(found.difference(_PARTS))]
    numbers = [
        [label, *(short(parts.get(name)) for name in names), short(sum(parts.values()))]
        for label, parts in rows
    ]
    return [
        charts.bar_chart(
            rows, {name: min(place, len(_PARTS) - 1) for place, name in enumerate(names)}
        ),
        _text(
            "Means over all ranks. Exposed communication is the wait for other ranks and for "
            "the network."
        ),
        _folded("as numbers", _table(["ms", *names, "step"], numbers)),
    ]


def _ranks(runs: Sequence[LoggedRun], drawn: Sequence[LoggedRun]) -> list[Markup]:
    rows = []
    for run in runs:
        last = when(run.last_time) if run.last_time else "–"
        for fit in run.fits[:-1]:
            rows.append(
                [
                    run.name,
                    when(fit.time),
                    fit.environment.get("ranks", "–"),
                    "",
                    fit.end or "not recorded: killed",
                ]
            )
        began = when(run.fits[-1].time) if run.fits else "–"
        ranks = (
            run.fits[-1].environment.get("ranks", "–") if run.fits else run.result.get("ranks", "–")
        )
        rows.append([run.name, began, ranks, last, run.end])
    parts = [_table(["run", "fit began", "ranks", "last value logged", "end"], rows)]
    slowest = [
        [run.name, rank, f"{100 * share:.0f} % of logged steps", f"{short(behind)} ms"]
        for run in drawn
        for rank, share, behind in slowest_ranks(run)[:4]
    ]
    if slowest:
        parts.append(
            _text(
                "The slowest rank is the one whose own work takes longest, for which "
                "the others wait:"
            )
        )
        parts.append(
            _table(["run", "rank", "slowest in", "then behind the others by (median)"], slowest)
        )
    sizes = [tag for tag in _tags(drawn) if tag.endswith("world_size")]
    changed = [
        tag
        for tag in sizes
        if any(len({p.value for p in run.scalars.get(tag, ())}) > 1 for run in drawn)
    ]
    return [*parts, _charts(drawn, changed)]


def _pictures(runs: Sequence[LoggedRun]) -> list[Markup]:
    """Nearest neighbours and confusions first, while there is room on the page."""
    room, figures, num_left_out = _MOST_PICTURE_BYTES, [], 0
    figure = Markup(
        "<figure><figcaption>{} {}, {}, step {:,}</figcaption>"
        '<img loading="lazy" alt="{}" src="data:image/png;base64,{}"></figure>'
    )
    for tag in sorted(
        {tag for run in runs for tag in run.pictures}, key=lambda tag: ("nearest" not in tag, tag)
    ):
        for number, run in enumerate(runs):
            picture = run.pictures.get(tag)
            if picture is None or len(picture.png) > room:
                num_left_out += picture is not None
                continue
            room -= len(picture.png)
            data = base64.b64encode(picture.png).decode()
            figures.append(
                figure.format(charts.key(number), tag, run.name, picture.step, tag, data)
            )
    if not figures and not num_left_out:
        return [_text("No images were logged.")]
    parts = [Markup('<div class="charts">{}</div>').format(Markup("").join(figures))]
    if num_left_out:
        megabytes = _MOST_PICTURE_BYTES // 1_000_000
        parts.append(
            _text("Left out, because a page holds {} MB of pictures: {}.", megabytes, num_left_out)
        )
    return parts


def _comparison(
    runs: Sequence[LoggedRun], values: Callable[[LoggedRun], Mapping[str, str]], missing: str
) -> list[Markup]:
    having, rows = compared(runs, values)
    differ = [(name, *row) for name, row in rows.items() if len(set(row)) > 1]
    share = [(name, row[0]) for name, row in rows.items() if len(set(row)) == 1]
    parts = [_table(["", *(run.name for run in having)], differ)] if differ else []
    if share:
        parts.append(
            _folded(
                f"the same in all runs ({len(share)})", _table([], share), unfolded=len(share) < 20
            )
        )
    if len(having) < len(runs):
        parts.append(
            _text("Not recorded by {} of {} runs: {}.", len(runs) - len(having), len(runs), missing)
        )
    return parts
