"""Runs as they lie on disk: TensorBoard's event files, and hparams.yaml beside them."""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_ring.errors import ConfigurationError
from lightning_ring.tools.masking import masked

# Texts of `lightning_ring.monitor.dashboard`.
ENVIRONMENT, END = "ring/environment/text_summary", "ring/end/text_summary"
_MOST_SECONDS = 1e10  # since 1970
_MOST_BRACKETS, _MOST_ALIASES = 1_000, 10  # of a configuration


class Fit(NamedTuple):
    """One call of `Trainer.fit`, as `RingMonitor` recorded it; ``end`` is empty without one."""

    time: float
    environment: Mapping[str, str]
    end: str = ""


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """``scalars``: TensorBoard's events by tag, one a step; ``pictures``: the last of each tag;
    ``config``: by dotted names."""

    name: str
    scalars: Mapping[str, list[Any]]
    pictures: Mapping[str, Any]
    config: Mapping[str, str]
    fits: tuple[Fit, ...]

    def last(self, tag: str) -> float | None:
        return self.scalars[tag][-1].value if tag in self.scalars else None

    @property
    def seconds(self) -> float | None:
        """Of training: between values that no test logged."""
        trained = [tag for tag in self.scalars if not tag.startswith("test")]
        times = [point.wall_time for tag in trained for point in self.scalars[tag]]
        return max(times) - min(times) if times else None

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

    Raises `ConfigurationError`: a folder holds no event files, or such as TensorBoard cannot read.
    """
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        below = {file.parent.resolve() for file in folder.resolve().rglob("*.tfevents.*")}
        if not below:
            raise ConfigurationError(
                f"{folder} holds no TensorBoard event files (*.tfevents.*), or is not there. Name "
                "the folder that a TensorBoardLogger writes to (latest/NAME, or "
                "lightning_logs/version_0), or one above several, such as a sweep's."
            )
        found |= dict.fromkeys(sorted(below, key=_numbers_by_value))
    # Paths below the folder above all; of a single one its last two parts.
    above = os.path.commonpath(found) if len(found) > 1 else next(iter(found)).parents[1]
    runs = []
    for folder in found:
        try:
            runs.append(_read_run(folder, os.path.relpath(folder, above)))
        # TensorBoard raises of every kind on damaged events.
        except Exception as error:
            raise ConfigurationError(
                f"{folder} holds damaged event files ({error!r:.200}). Move them away to see the "
                "other runs."
            ) from error
    return runs


def _numbers_by_value(path: Path) -> str:
    return re.sub(r"\d+", lambda digits: digits[0].zfill(20), str(path))


def _read_run(folder: Path, name: str) -> LoggedRun:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    # How many of each tag are kept; 0: all.
    sizes = {"scalars": 0, "tensors": 0, "images": 1}
    events = EventAccumulator(str(folder), size_guidance=sizes, purge_orphaned_data=False).Reload()
    tags = events.Tags()
    # A run that went on from a checkpoint logged some steps twice: the later value counts.
    scalars = {}
    for tag in tags["scalars"]:
        if by_step := {one.step: one for one in _timed(events.Scalars(tag))}:
            scalars[tag] = [by_step[step] for step in sorted(by_step)]
    starts, ends = (
        _timed(events.Tensors(tag)) if tag in tags["tensors"] else [] for tag in (ENVIRONMENT, END)
    )
    # The run's folder may have been moved since its paths were written.
    path, found = re.compile(rf"\S*/{re.escape(folder.name)}(?=/|$)"), _flatten(_read(folder))
    config = {key: path.sub("RUN", value) for key, value in found}
    pictures = {tag: events.Images(tag)[-1] for tag in tags["images"]}
    return LoggedRun(name, scalars, pictures, config, tuple(_fits(starts, ends)))


def _timed(events: Iterable[Any]) -> list[Any]:
    """Those of ``events`` whose time is one: of damaged ones it may be any number."""
    return [event for event in events if 0 <= event.wall_time < _MOST_SECONDS]


def _fits(starts: list[Any], ends: list[Any]) -> Iterator[Fit]:
    times = [*(event.wall_time for event in starts), float("inf")]
    for number, event in enumerate(starts):
        rows = (re.fullmatch(r"\| (.+?) \| (.*) \|", line) for line in _text(event).splitlines())
        found = {row[1]: row[2].replace("\\|", "|") for row in rows if row}
        own = [_text(end) for end in ends if times[number] <= end.wall_time < times[number + 1]]
        yield Fit(times[number], found, *own[-1:])


def _text(event: Any) -> str:
    return b"".join(event.tensor_proto.string_val).decode(errors="replace")


def _read(folder: Path) -> Any:
    """hparams.yaml without secrets, whose values are texts, whatever their tags
    (``!!python/object``) would make of them."""
    path = folder / "hparams.yaml"
    try:
        text = path.read_text() if path.is_file() else "{}"
        # The scanner looks at each open bracket for each token.
        if text.count("[") + text.count("{") > _MOST_BRACKETS:
            raise ValueError("too many brackets")
        # An alias repeats a value, and nested ones repeat it millions of times.
        events = yaml.parse(text, yaml.BaseLoader)
        if sum(isinstance(event, yaml.AliasEvent) for event in events) > _MOST_ALIASES:
            raise ValueError("too many aliases")
        return masked(yaml.load(text, yaml.BaseLoader))
    except (yaml.YAMLError, OSError, ValueError, OverflowError, RecursionError) as error:
        return {path.name: f"cannot be read: {type(error).__name__}"}


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, json.dumps(value) if isinstance(value, (list, dict)) else value
