"""Runs as they lie on disk: TensorBoard's event files, Hydra's configuration, hparams.yaml and
result.json.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lightning_ring.errors import ConfigurationError

# texts of `lightning_ring.monitor.dashboard`
ENVIRONMENT, END = "ring/environment/text_summary", "ring/end/text_summary"
_NUM_FOLDERS_UP = 3  # from event files to a configuration: FOLDER/lightning_logs/version_0


class Point(NamedTuple):
    step: int
    time: float  # seconds since 1970
    value: float


class Picture(NamedTuple):
    step: int
    png: bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """One call of `Trainer.fit`, as `RingMonitor` recorded it. ``end`` is empty where no end was
    recorded.
    """

    time: float
    environment: Mapping[str, str]
    end: str


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """``scalars`` by tag, a point a step; ``pictures`` are the last of each tag; ``config`` has
    dotted names.
    """

    name: str
    scalars: Mapping[str, list[Point]] = field(default_factory=dict)
    pictures: Mapping[str, Picture] = field(default_factory=dict)
    config: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)
    fits: tuple[Fit, ...] = ()

    def last(self, tag: str) -> float | None:
        return self.scalars[tag][-1].value if tag in self.scalars else None

    @property
    def last_time(self) -> float:
        """Seconds since 1970 of the last logged value; 0 without values."""
        return max((points[-1].time for points in self.scalars.values()), default=0.0)

    @property
    def seconds(self) -> float | None:
        """Of training: as result.json says, else from the first to the last value that was not
        logged by a test.
        """
        if isinstance(self.result.get("seconds"), (int, float)):
            return float(self.result["seconds"])
        trained = [points for tag, points in self.scalars.items() if not tag.startswith("test")]
        times = [point.time for points in trained for point in (points[0], points[-1])]
        return max(times) - min(times) if times else None

    @property
    def environment(self) -> Mapping[str, str]:
        return self.fits[-1].environment if self.fits else {}

    @property
    def end(self) -> str:
        """How the run ended; "not recorded" is all that remains of one that was killed."""
        if self.fits:
            return self.fits[-1].end or "not recorded: killed, or still running"
        return "finished" if self.result else "not recorded"


def read_runs(folders: Iterable[str | Path]) -> list[LoggedRun]:
    """The runs in ``folders``: each folder below them that holds event files is one.

    Raises `ConfigurationError`: a folder does not exist, or holds no event files.
    """
    found: dict[Path, None] = {}
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ConfigurationError(
                f"{folder}: no such folder. Name the folder of a run (logs/NAME/DATE_TIME, or "
                "lightning_logs/version_0), or one above several runs, such as a sweep's."
            )
        below = {file.parent.resolve() for file in folder.rglob("*.tfevents.*")}
        if not below:
            raise ConfigurationError(
                f"{folder} holds no TensorBoard event files (*.tfevents.*), in no folder below it "
                "either. Train with a TensorBoardLogger (recipes: logger=tensorboard), and name "
                "the folder that it writes to."
            )
        found |= dict.fromkeys(sorted(below, key=_numbers_by_value))
    return [
        _read_run(folder, name) for folder, name in zip(found, _names(list(found)), strict=True)
    ]


def _numbers_by_value(path: Path) -> list[str]:
    return [word.zfill(20) if word.isdecimal() else word for word in re.split(r"(\d+)", str(path))]


def _names(folders: list[Path]) -> list[str]:
    """Paths below the folder above all, without the overrides that all have; of a single one its
    last two parts.
    """
    if len(folders) == 1:
        return ["/".join(folders[0].parts[-2:])]
    above = Path(os.path.commonpath(folders))
    names = [
        folder.relative_to(above).as_posix() if folder != above else folder.name
        for folder in folders
    ]
    everywhere = set.intersection(*(set(name.split(",")) for name in names))
    return [
        ",".join(word for word in name.split(",") if word not in everywhere) or name
        for name in names
    ]


def _read_run(folder: Path, name: str) -> LoggedRun:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    keep_all, keep_last = 0, 1
    sizes = {
        "scalars": keep_all,
        "tensors": keep_all,
        "images": keep_last,
        "histograms": 1,
        "compressedHistograms": 1,
    }
    events = EventAccumulator(str(folder), size_guidance=sizes, purge_orphaned_data=False).Reload()
    tags = events.Tags()
    scalars = {tag: list(_by_step(events.Scalars(tag))) for tag in tags["scalars"]}
    pictures = {tag: events.Images(tag)[-1] for tag in tags["images"]}
    texts = {
        tag: [(event.wall_time, _text(event.tensor_proto)) for event in events.Tensors(tag)]
        for tag in (ENVIRONMENT, END)
        if tag in tags["tensors"]
    }
    above = (folder, *folder.parents[:_NUM_FOLDERS_UP])
    home = next((one for one in above if (one / ".hydra").is_dir()), folder)
    return LoggedRun(
        name,
        scalars={tag: points for tag, points in scalars.items() if points},
        pictures={
            tag: Picture(one.step, one.encoded_image_string) for tag, one in pictures.items()
        },
        config=_config(home, folder),
        overrides=dict(_overrides(home / ".hydra" / "overrides.yaml")),
        result=_json(home / "result.json"),
        fits=tuple(_fits(texts.get(ENVIRONMENT, []), texts.get(END, []))),
    )


def _by_step(events: Iterable[Any]) -> Iterator[Point]:
    """A run that went on from a checkpoint logged some steps twice: the later value counts."""
    by_step = {event.step: Point(event.step, event.wall_time, event.value) for event in events}
    yield from (by_step[step] for step in sorted(by_step))


def _text(tensor: Any) -> str:
    return b"".join(tensor.string_val).decode(errors="replace")


def _fits(starts: list[tuple[float, str]], ends: list[tuple[float, str]]) -> Iterator[Fit]:
    for number, (time, text) in enumerate(starts):
        until = starts[number + 1][0] if number + 1 < len(starts) else float("inf")
        rows = (re.fullmatch(r"\| (.+?) \| (.*) \|", line) for line in text.splitlines()[2:])
        environment = {row[1]: row[2].replace("\\|", "|") for row in rows if row}
        yield Fit(
            time,
            environment,
            next((end for when, end in reversed(ends) if time <= when < until), ""),
        )


def _yaml(path: Path) -> Any:
    """All values are texts, whatever their tags (``!!python/object`` and the like) would make of
    them.
    """
    try:
        return yaml.load(path.read_text(), yaml.BaseLoader) if path.is_file() else None
    except (yaml.YAMLError, OSError, UnicodeDecodeError) as error:
        return {path.name: f"cannot be read: {type(error).__name__}"}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _config(home: Path, folder: Path) -> dict[str, str]:
    """Hydra's configuration; hparams.yaml adds what interpolations became, and what the strategy
    was given.
    """
    flat = dict(_flatten(_yaml(home / ".hydra" / "config.yaml"))) | dict(
        _flatten(_yaml(folder / "hparams.yaml"))
    )
    hydra = dict(_flatten(_yaml(home / ".hydra" / "hydra.yaml")))
    written = hydra.get("hydra.runtime.output_dir", str(home))  # the run may have been moved since
    return {name: value.replace(written, "RUN") for name, value in flat.items()}


def _flatten(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}" if name else str(key))
    elif name:
        yield name, json.dumps(value) if isinstance(value, (list, dict)) else value


def _overrides(path: Path) -> Iterator[tuple[str, str]]:
    words = _yaml(path)
    for word in words if isinstance(words, list) else ():
        name, _, value = str(word).partition("=")
        yield name.lstrip("+~"), value


def when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
