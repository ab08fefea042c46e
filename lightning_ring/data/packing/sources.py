"""The images of a packing and their labels, listed once and kept on the disk.

A list takes some 30 bytes of memory an image. A resumed packing reads the same list.
"""

from __future__ import annotations

import json
import os
import unicodedata
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import report_row, whole_file, write_whole
from lightning_ring.data.packing.listing import Found, LeftOut, read_csv, scan_folder
from lightning_ring.errors import ConfigurationError


def sorted_classes(names: Iterable[str], source: Path) -> list[str]:
    """Classes in the order of their numbers: sorted as ImageFolder sorts them, or by value if all are numbers.

    So labels 0, 1, ..., 10 of a CSV stay what they are. Raises `ConfigurationError`: two names that people read as one:
    "cat" and "Cat", "1" and "01", or one accent written in two ways.
    """
    names = list(names)
    numbers = all(name.isdecimal() and name.isascii() for name in names)
    same: dict[str, str] = {}
    for name in names:
        plain = str(int(name)) if numbers else unicodedata.normalize("NFC", name).strip().casefold()
        if plain in same:
            raise ConfigurationError(
                f"{source} has two classes of one name, {same[plain]!r} and {name!r}. Put their images into one class, "
                "or rename one of them."
            )
        same[plain] = name
    return sorted(names, key=int if numbers else None)


_REPORT = "sources.csv"
_SEED = 0  # of the one shuffle that mixes the classes


@dataclass(frozen=True)
class Sources:
    """Images to pack, in the order in which they are packed; ``report`` has a row for each of ``left_out`` others."""

    folder: Path  # names are relative to it
    classes: list[str]
    report: bytes
    left_out: int
    labels: npt.NDArray[np.int32]
    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.order)

    def name(self, position: int) -> bytes:
        """The file name at ``position``, as the folder or the CSV has it, in the file system's encoding."""
        i = int(self.order[position])
        start = int(self.ends[i - 1]) if i else 0
        return self.names[start : int(self.ends[i])].tobytes()

    def path(self, position: int) -> Path:
        return self.folder / os.fsdecode(self.name(position))

    def label(self, position: int) -> int:
        return int(self.labels[self.order[position]])


def list_sources(source: Path, into: Path, group_by_class: bool) -> Sources:
    """Write the list of ``source`` to the folder ``into``, ``sources.json`` last, and load it.

    Raises `ConfigurationError`: ``source`` is neither a folder of class folders nor a CSV, or has no image, or its
    classes cannot be told apart.
    """
    found = scan_folder(source) if source.is_dir() else read_csv(source)
    with whole_file(into / _REPORT) as report, whole_file(into / "names") as names:
        listed = _write_list(found, report, names)
    if not listed.labels:
        raise ConfigurationError(f"{source} lists no image.{_first_lines(into / _REPORT)}")
    classes = sorted_classes(listed.numbers, source)
    renumber = np.empty(len(classes), np.int32)
    renumber[[listed.numbers[name] for name in classes]] = np.arange(len(classes))
    labels = renumber[np.frombuffer(listed.labels, np.int32)]
    mixing = np.random.Generator(np.random.Philox(_SEED))
    columns: dict[str, npt.NDArray[Any]] = {
        "labels": labels,
        "ends": np.frombuffer(listed.ends, np.int64),
        # kept on disk with the list: numpy does not promise the same permutation in its next version
        "order": np.argsort(labels, kind="stable") if group_by_class else mixing.permutation(len(labels)),
    }
    for name, values in columns.items():
        with whole_file(into / f"{name}.npy") as file:
            np.save(file, values)
    head = {"folder": str(source if source.is_dir() else source.parent), "classes": classes}
    write_whole(into / "sources.json", json.dumps(head | {"left_out": listed.left_out}).encode())
    sources = load_sources(into)
    assert sources is not None
    return sources


class _Listed(NamedTuple):
    numbers: dict[str, int]  # of the classes, in the order in which they were met
    labels: array[int]
    ends: array[int]
    left_out: int


def _write_list(found: Iterable[Found | LeftOut], report: BinaryIO, names: BinaryIO) -> _Listed:
    numbers: dict[str, int] = {}
    labels, ends, end, left_out = array("i"), array("q"), 0, 0
    for item in found:
        if isinstance(item, LeftOut):
            report.write(report_row("left out", item.name, item.reason))
            left_out += 1
            continue
        number = numbers.setdefault(item.class_name, len(numbers))
        if item.name is not None:
            end += names.write(os.fsencode(item.name))
            ends.append(end)
            labels.append(number)
    return _Listed(numbers, labels, ends, left_out)


def _first_lines(report: Path, most: int = 5) -> str:
    lines = report.read_bytes().decode("utf-8", "backslashreplace").splitlines()
    return "".join(f"\n  {line}" for line in lines[:most]) + (f"\n  and {len(lines) - most} more" * (len(lines) > most))


def load_sources(folder: Path) -> Sources | None:
    """The list that `list_sources` wrote to ``folder``; None where it did not finish."""
    if not (folder / "sources.json").exists():
        return None
    head = json.loads((folder / "sources.json").read_bytes())
    return Sources(
        folder=Path(head["folder"]),
        classes=head["classes"],
        report=(folder / _REPORT).read_bytes(),
        left_out=head["left_out"],
        labels=np.load(folder / "labels.npy", mmap_mode="r"),
        order=np.load(folder / "order.npy", mmap_mode="r"),
        ends=np.load(folder / "ends.npy", mmap_mode="r"),
        names=np.memmap(folder / "names", mode="r"),
    )
