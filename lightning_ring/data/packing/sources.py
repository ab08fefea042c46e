"""The images of a packing and their labels, listed once and kept on the disk.

A list takes some 40 bytes of memory an image. A resumed packing lists the source again, and goes on
if it is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import unicodedata
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import report_row, whole_file, write_whole
from lightning_ring.data.packing.listing import Found, LeftOut, read_csv, scan_folder
from lightning_ring.errors import ConfigurationError


def sorted_classes(names: Iterable[str], source: Path) -> list[str]:
    """Classes in the order of their numbers: sorted as ImageFolder sorts them, or by value if all
    are numbers.

    So labels 0, 1, ..., 10 of a CSV stay what they are. Raises `ConfigurationError`: two names that
    people read as one: "cat" and "Cat", "1" and "01", or one accent written in two ways.
    """
    names = list(names)
    check_distinct(names, source)
    return sorted(names, key=int if _are_numbers(names) else None)


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() and name.isascii() for name in names)


def check_distinct(names: Sequence[str], source: Path) -> None:
    """Raises `ConfigurationError`: two names are one to people."""
    numbers = _are_numbers(names)
    same: dict[str, str] = {}
    for name in names:
        plain = str(int(name)) if numbers else unicodedata.normalize("NFC", name).strip().casefold()
        if plain in same:
            raise ConfigurationError(
                f"{source} has two classes of one name, {same[plain]!r} and {name!r}. Put their "
                "images into one class, or rename one of them."
            )
        same[plain] = name


_REPORT = "sources.csv"
_SEED = 0  # of the one shuffle that mixes the classes


@dataclass(frozen=True)
class Sources:
    """Images to pack, in the order in which they are packed; ``report`` has a row for each of
    ``left_out`` others.

    ``stamps`` tell one version of a file from another, by its length and time. ``identity`` is the
    same for two lists of the same classes, files, labels and stamps in the same order. ``there``
    images are in the set already, and have no place in ``order``.
    """

    folder: Path  # names are relative to it
    classes: list[str]
    report: bytes
    left_out: int
    identity: str
    labels: npt.NDArray[np.int32]
    order: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    names: npt.NDArray[np.uint8]
    stamps: npt.NDArray[np.uint64]
    there: int = 0

    def __len__(self) -> int:
        return len(self.order)

    def name(self, position: int) -> bytes:
        """The name at ``position``: the file's, as the folder or the CSV has it, in its
        encoding.
        """
        return self.listed_name(int(self.order[position]))

    def listed_name(self, i: int) -> bytes:
        """The ``i``-th of the list, which is not mixed."""
        start = int(self.ends[i - 1]) if i else 0
        return self.names[start : int(self.ends[i])].tobytes()

    def path(self, position: int) -> Path:
        return self.folder / os.fsdecode(self.name(position))

    def label(self, position: int) -> int:
        return int(self.labels[self.order[position]])


def list_sources(
    source: Path,
    into: Path,
    group_by_class: bool,
    classes: Sequence[str] | None = None,
    first: Sequence[str] = (),
) -> Sources:
    """Write the list of ``source`` to the folder ``into``, ``sources.json`` last, and load it.

    Args:
        classes: Their names in the order of their numbers; left out, ``first``, then the others by
            `sorted_classes`.

    Raises `ConfigurationError`: ``source`` is neither a folder of class folders nor a CSV, or has
    no image, or its classes cannot be told apart, or are none of ``classes``.
    """
    found = scan_folder(source) if source.is_dir() else read_csv(source)
    with whole_file(into / _REPORT) as report, whole_file(into / "names") as names:
        listed = _write_list(found, report, names)
    if not listed.labels:
        raise ConfigurationError(f"{source} lists no image.{_first_lines(into / _REPORT)}")
    if classes is None:
        known = set(first)
        classes = [
            *first,
            *sorted_classes([name for name in listed.numbers if name not in known], source),
        ]
        check_distinct(classes, source)
    classes = list(classes)
    renumber = _class_numbers(listed.numbers, classes, source)
    labels = renumber[np.frombuffer(listed.labels, np.int32)]
    mixing = np.random.Generator(np.random.Philox(_SEED))
    columns: dict[str, npt.NDArray[Any]] = {
        "labels": labels,
        "ends": np.frombuffer(listed.ends, np.int64),
        # kept on disk with the list: numpy does not promise the same permutation in its next
        # version
        "order": np.argsort(labels, kind="stable")
        if group_by_class
        else mixing.permutation(len(labels)),
    }
    for name, values in columns.items():
        with whole_file(into / f"{name}.npy") as file:
            np.save(file, values)
    folder = source if source.is_dir() else source.parent
    stamps = _stamps(str(folder), into / "names", columns["ends"])
    with whole_file(into / "stamps.npy") as file:
        np.save(file, stamps)
    identity = hashlib.sha256(json.dumps(classes).encode())
    for part in (labels, columns["ends"], np.memmap(into / "names", mode="r"), stamps):
        identity.update(np.ascontiguousarray(part).view(np.uint8).data)
    head = {
        "folder": str(folder),
        "classes": classes,
        "left_out": listed.left_out,
        "identity": identity.hexdigest(),
    }
    write_whole(into / "sources.json", json.dumps(head | {"there": 0}).encode())
    sources = load_sources(into)
    assert sources is not None
    return sources


def _class_numbers(
    found: dict[str, int], classes: Sequence[str], source: Path
) -> npt.NDArray[np.int32]:
    """By number of a class in the order in which it was ``found``: its number in ``classes``."""
    numbers = {name: number for number, name in enumerate(classes)}
    if strange := sorted(found.keys() - numbers.keys()):
        shown = ", ".join(map(repr, strange[:5])) + ", ..." * (len(strange) > 5)
        raise ConfigurationError(
            f"{source} has classes that --classes does not list: {shown} ({len(strange)} of "
            f"{len(found)}). Add them at its end, so that the others keep their numbers, or take "
            "their images away."
        )
    return np.array([numbers[name] for name in found], np.int32)


_AT_ONCE = 4096  # files a thread looks at before it takes others
_THREADS = 16  # a network file system answers many questions in the time of one


def _stamps(folder: str, names: Path, ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Of each file a number made of its length and time; 0 where there is none."""
    text = np.memmap(names, mode="r")

    def look(first: int) -> npt.NDArray[np.uint64]:
        start = int(ends[first - 1]) if first else 0
        found = array("Q")
        for end in ends[first : first + _AT_ONCE].tolist():
            try:
                status = os.stat(os.path.join(folder, os.fsdecode(text[start:end].tobytes())))
                found.append((status.st_size * 0x9E3779B97F4A7C15 ^ status.st_mtime_ns) % 2**64)
            except (OSError, ValueError):  # the packing says so when it comes to it
                found.append(0)
            start = end
        return np.array(found, np.uint64)

    with ThreadPoolExecutor(_THREADS) as pool:
        return np.concatenate(list(pool.map(look, range(0, len(ends), _AT_ONCE))))


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
    return "".join(f"\n  {line}" for line in lines[:most]) + (
        f"\n  and {len(lines) - most} more" * (len(lines) > most)
    )


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
        identity=head["identity"],
        labels=np.load(folder / "labels.npy", mmap_mode="r"),
        order=np.load(folder / "order.npy", mmap_mode="r"),
        ends=np.load(folder / "ends.npy", mmap_mode="r"),
        names=np.memmap(folder / "names", mode="r"),
        stamps=np.load(folder / "stamps.npy", mmap_mode="r"),
        there=head["there"],
    )


def leave_out_there(folder: Path, there: npt.NDArray[np.bool_]) -> Sources:
    """Take the images of the list in ``folder`` that are ``there`` (a bool for each of the list)
    out of its order.
    """
    head, order = json.loads((folder / "sources.json").read_bytes()), np.load(folder / "order.npy")
    with whole_file(folder / "order.npy") as file:
        np.save(file, order[~there[order]])
    write_whole(folder / "sources.json", json.dumps(head | {"there": int(there.sum())}).encode())
    sources = load_sources(folder)
    assert sources is not None
    return sources
