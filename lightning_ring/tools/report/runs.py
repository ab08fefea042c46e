"""Runs as they lie on disk: TensorBoard's event files, and hparams.yaml beside them."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.masking import masked

# Texts of `lightning_ring.monitor.dashboard`.
ENVIRONMENT, END = "ring/environment/text_summary", "ring/end/text_summary"
_MOST_SECONDS = 1e10  # since 1970
_MOST_VALUES = 100_000  # of a configuration
_MOST_BRACKETS = 100


class Fit(NamedTuple):
    """One call of `Trainer.fit`, as `RingMonitor` recorded it. ``end`` is empty where no end was
    recorded.
    """

    time: float
    environment: Mapping[str, str]
    end: str


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """Events are TensorBoard's: ``scalars`` by tag, one a step; ``pictures`` are the last of each
    tag. ``config`` has dotted names.
    """

    name: str
    scalars: Mapping[str, list[Any]] = field(default_factory=dict)
    pictures: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()

    def last(self, tag: str) -> float | None:
        return self.scalars[tag][-1].value if tag in self.scalars else None

    @property
    def seconds(self) -> float | None:
        """Of training: between values that no test logged."""
        trained = [points for tag, points in self.scalars.items() if not tag.startswith("test")]
        times = [point.wall_time for points in trained for point in (points[0], points[-1])]
        return max(times) - min(times) if times else None

    @property
    def last_time(self) -> float:
        """Seconds since 1970 of the last logged value; 0 without values."""
        return max((points[-1].wall_time for points in self.scalars.values()), default=0.0)

    @property
    def environment(self) -> Mapping[str, str]:
        return self.fits[-1].environment if self.fits else {}

    @property
    def end(self) -> str:
        """How the run ended. Rank 0 of an elastic job may be another process at the end."""
        if not self.fits:
            return "not recorded: RingMonitor does"
        end, deaths = self.fits[-1].end, int(self.last("ring/deaths") or 0)
        died = f", after {deaths} rank(s) died" if deaths else ""
        return f"{end}{died}" if end else "not recorded: killed, or still running"


def read_runs(folders: Iterable[str | Path]) -> list[LoggedRun]:
    """The runs in ``folders``: each folder below them that holds event files is one.

    Raises `ConfigurationError`: a folder does not exist, or holds no event files, or such as
    TensorBoard cannot read.
    """
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ConfigurationError(
                f"{folder}: no such folder. Name the folder of a run (logs/NAME/latest, or "
                "lightning_logs/version_0), or one above several runs, such as a sweep's."
            )
        below = {file.parent.resolve() for file in folder.resolve().rglob("*.tfevents.*")}
        if not below:
            raise ConfigurationError(
                f"{folder} holds no TensorBoard event files (*.tfevents.*), in no folder below it "
                "either. Train with a TensorBoardLogger (recipes: logger=tensorboard), and name "
                "the folder that it writes to."
            )
        found |= dict.fromkeys(sorted(below, key=_numbers_by_value))
    runs = []
    for folder, name in zip(found, _names(list(found)), strict=True):
        try:
            runs.append(_read_run(folder, name))
        # TensorBoard raises of every kind on damaged events.
        except Exception as error:
            raise ConfigurationError(
                f"{folder} holds damaged event files ({error!r:.200}). Move them away to see the "
                "other runs."
            ) from error
    return runs


def _numbers_by_value(path: Path) -> list[str]:
    return [word.zfill(20) if word.isdecimal() else word for word in re.split(r"(\d+)", str(path))]


def _names(folders: list[Path]) -> list[str]:
    """Paths below the folder above all; of a single one its last two parts."""
    if len(folders) == 1:
        return ["/".join(folders[0].parts[-2:])]
    above = os.path.commonpath(folders)
    return [os.path.relpath(folder, above) for folder in folders]


def _read_run(folder: Path, name: str) -> LoggedRun:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # How many of each tag are kept; 0: all.
    sizes = {"scalars": 0, "tensors": 0, "images": 1, "histograms": 1, "compressedHistograms": 1}
    events = EventAccumulator(str(folder), size_guidance=sizes, purge_orphaned_data=False).Reload()
    tags = events.Tags()
    # A run that went on from a checkpoint logged some steps twice: the later value counts.
    by_step = {
        tag: {one.step: one for one in _timed(events.Scalars(tag))} for tag in tags["scalars"]
    }
    starts, ends = (
        _timed(events.Tensors(tag)) if tag in tags["tensors"] else [] for tag in (ENVIRONMENT, END)
    )
    # The run's folder may have been moved since its paths were written.
    path = re.compile(rf"\S*/{re.escape(folder.name)}(?=/|$)")
    config = {
        key: path.sub("RUN", value) for key, value in _flatten(_read(folder / "hparams.yaml"))
    }
    return LoggedRun(
        name,
        scalars={tag: [own[step] for step in sorted(own)] for tag, own in by_step.items() if own},
        pictures={tag: events.Images(tag)[-1] for tag in tags["images"]},
        config=config,
        fits=tuple(_fits(starts, ends)),
    )


def _timed(events: Iterable[Any]) -> list[Any]:
    """Those of ``events`` whose time is one: of damaged ones it may be any number."""
    return [event for event in events if 0 <= event.wall_time < _MOST_SECONDS]


def _fits(starts: list[Any], ends: list[Any]) -> Iterator[Fit]:
    times = [*(event.wall_time for event in starts), float("inf")]
    for number, event in enumerate(starts):
        rows = (re.fullmatch(r"\| (.+?) \| (.*) \|", line) for line in _text(event).splitlines())
        found = {row[1]: row[2].replace("\\|", "|") for row in rows if row}
        own = [_text(end) for end in ends if times[number] <= end.wall_time < times[number + 1]]
        yield Fit(times[number], found, own[-1] if own else "")


def _text(event: Any) -> str:
    return b"".join(event.tensor_proto.string_val).decode(errors="replace")


class _Loader(yaml.BaseLoader):
    """All values are texts. The scanner looks at each open bracket for each token."""

    def fetch_flow_collection_start(self, token: Any) -> None:
        if self.flow_level >= _MOST_BRACKETS:
            raise yaml.YAMLError(f"more than {_MOST_BRACKETS} brackets are open")
        super().fetch_flow_collection_start(token)


def _read(path: Path) -> Any:
    """YAML without secrets, whose values are texts, whatever their tags (``!!python/object``) would
    make of them.
    """
    try:
        found = yaml.load(path.read_text(), _Loader) if path.is_file() else {}
        # An alias repeats a value, and nested ones repeat it millions of times.
        if _count(found, {}) > _MOST_VALUES:
            raise ValueError("too many values")
        return masked(found)
    except (yaml.YAMLError, OSError, ValueError, OverflowError, RecursionError) as error:
        return {path.name: f"cannot be read: {type(error).__name__}"}


def _count(value: Any, known: dict[int, int]) -> int:
    """Values in ``value``, in which one may occur many times."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        inner = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(each, known) for each in inner)
    return known[id(value)]


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, json.dumps(value) if isinstance(value, (list, dict)) else value
