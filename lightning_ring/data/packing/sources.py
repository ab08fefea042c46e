"""The images of a packing and their labels, from a folder of class folders or a CSV file.

A list takes some 40 bytes of memory an image beside its name. A resumed packing lists the source
again, and goes on if it is the same.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from io import StringIO
from itertools import chain
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_ring.errors import ConfigurationError

HEADER = b"what,name,detail\n"


def report_row(what: str, name: str, detail: str) -> bytes:
    """A line of the report. ``what``: "left out", "converted" or "empty class"."""
    line = StringIO()
    csv.writer(line, lineterminator="\n").writerow([what, name, detail])
    # a name may hold bytes that are no UTF-8
    return line.getvalue().encode("utf-8", "surrogateescape")


class Found(NamedTuple):
    """An image and its class; a class that has no image is one with ``name`` None."""

    name: str | None
    class_name: str


class LeftOut(NamedTuple):
    """Something that is not packed, and why."""

    name: str
    reason: str


# ImageFolder's own.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def scan_folder(folder: Path) -> Iterator[Found | LeftOut]:
    """Every image below a class folder, and everything else by name. Names are relative to
    ``folder``; links are followed.

    Raises:
        OSError: A folder cannot be read.
        ConfigurationError: A link leads to a folder that it is in.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_dir():
            yield LeftOut(entry.name, "not in a class folder")
        elif entry.name.startswith("."):
            yield LeftOut(entry.name, "a hidden folder is no class")
        else:
            yield Found(None, entry.name)
            # sorted() as ImageFolder has it, which is not the order of a walk through sorted
            # folders ("a-b" before "a/c").
            for root, files in sorted(_walk(entry.path)):
                for file in sorted(files):
                    name = os.path.relpath(os.path.join(root, file), folder)
                    if file.lower().endswith(EXTENSIONS):
                        yield Found(name, entry.name)
                    else:
                        known = " ".join(EXTENSIONS)
                        reason = f"its extension is none of {known}; a CSV can list it all the same"
                        yield LeftOut(name, reason)


def _walk(top: str) -> Iterator[tuple[str, list[str]]]:
    """The folders at and below ``top``, with their files."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave a folder that it cannot read out without a word

    for root, folders, files in os.walk(top, onerror=fail, followlinks=True):
        here = os.path.realpath(root) + os.sep
        for path in (os.path.join(root, name) for name in folders):
            if os.path.islink(path) and here.startswith(os.path.realpath(path) + os.sep):
                raise ConfigurationError(f"{path} is a link to a folder that it is in. Remove it.")
        yield root, files


def read_csv(file: Path) -> Iterator[Found | LeftOut]:
    """An image for each row; rows without path or label by line. Paths are relative to ``file``.

    ``./a.jpg`` and ``a.jpg`` are one path, as are ``a//b.jpg`` and ``a/b.jpg``; links are not
    followed. Raises `ConfigurationError`: the first line lacks the columns, the file is not CSV, or
    a path is there twice.
    """
    hashes = array("q")  # 8 bytes a row, where a set of all paths would take some 200
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as text:
        reader = csv.DictReader(text, restval="")
        try:
            columns = [cell.strip().lower() for cell in reader.fieldnames or []]
            if columns.count("path") != 1 or columns.count("label") != 1:
                raise ConfigurationError(
                    f"{file} starts with the columns {columns}, expected path and label. Write "
                    "`path,label` as its first line; paths are relative to its folder, or "
                    "absolute."
                )
            reader.fieldnames = columns
            for row in reader:
                path, label = row["path"].strip(), row["label"].strip()
                # `./a//b.jpg` and `a/b.jpg` are one path; `..` stays: after a link it leads
                # elsewhere.
                if "./" in path or "//" in path:
                    path = str(PurePath(path))
                if path and label:
                    hashes.append(hash(path))
                    yield Found(path, label)
                    continue
                where = f"line {reader.line_num} of {file.name}"
                yield LeftOut(path or file.name, f"{where} has no {'label' if path else 'path'}")
        except csv.Error as error:
            raise ConfigurationError(
                f"{file}, line {reader.reader.line_num}, is not CSV: {error}."
            ) from None
    ascending = np.sort(np.frombuffer(hashes, np.int64))
    repeated = ascending[1:][ascending[1:] == ascending[:-1]]
    if len(repeated):
        name = next(item.name for item in read_csv(file) if hash(item.name) == repeated[0])
        raise ConfigurationError(f"{file} lists {name!r} twice. Give each image one row.")


def _are_numbers(names: Sequence[str]) -> bool:
    return all(name.isdecimal() and name.isascii() for name in names)


def check_distinct(names: Sequence[str], source: Path) -> None:
    """Raises `ConfigurationError`: people read two names as one: "cat" and "Cat", "1" and "01", or
    one accent written in two ways.
    """
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


def read_classes(file: Path) -> list[str]:
    """Names of classes in the order of their numbers: a line each, or those of the
    ``manifest.json`` of other shards.

    Raises `ConfigurationError`: it cannot be read, names no class, or one twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
        is_manifest = file.suffix == ".json"
        classes = json.loads(text)["classes"] if is_manifest else text.rstrip("\n").split("\n")
        if not all(isinstance(name, str) and name for name in classes):
            raise ValueError("a name of a class is empty, or no text")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(
            f"--classes {file} cannot be read: {error}. Expected a text file with the name of a "
            "class in each line, or the manifest.json of packed shards."
        ) from None
    check_distinct(classes, file)
    return list(classes)


@dataclass(frozen=True)
class Sources:
    """Images to pack, as they are listed, and the ``order`` in which they are packed; ``report``
    has a row for each of ``left_out`` others.

    ``stamps`` tell one version of a file from another, by its length and time. ``there`` images are
    in the set already, and have no place in ``order``.
    """

    folder: str  # names are relative to it
    classes: list[str]
    left_out: int
    report: bytes
    text: bytes  # all names
    ends: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int32]
    stamps: npt.NDArray[np.uint64]
    order: npt.NDArray[np.int64]
    there: int = 0

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def identity(self) -> str:
        """The same for two lists of the same classes, files, labels and stamps in the same
        order.
        """
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        parts: list[Any] = [self.labels, self.ends, self.text, self.stamps]
        for part in parts:
            digest.update(part)
        return digest.hexdigest()

    def name(self, i: int) -> str:
        """The ``i``-th of the list, as the folder or the CSV has it."""
        start = self.ends[i - 1] if i else 0
        return os.fsdecode(self.text[start : self.ends[i]])

    def packed_name(self, position: int) -> str:
        return self.name(int(self.order[position]))

    def path(self, position: int) -> Path:
        return Path(self.folder, self.packed_name(position))

    def label(self, position: int) -> int:
        return int(self.labels[self.order[position]])


def list_sources(
    source: Path,
    group_by_class: bool,
    classes: Sequence[str] | None = None,
    first: Sequence[str] = (),
) -> Sources:
    """The images of ``source``.

    Args:
        classes: Their names in the order of their numbers; left out, ``first``, then the others:
            sorted as ImageFolder sorts them, or by value if all are numbers, so that labels 0, 1,
            ..., 10 of a CSV stay what they are.

    Raises `ConfigurationError`: ``source`` is neither a folder of class folders nor a CSV, or has
    no image, or its classes cannot be told apart, or are none of ``classes``.
    """
    numbers: dict[str, int] = {}  # of classes, in the order in which they are met
    report, names, ends, met = list[bytes](), bytearray(), array("q"), array("i")
    for item in scan_folder(source) if source.is_dir() else read_csv(source):
        if isinstance(item, LeftOut):
            report.append(report_row("left out", item.name, item.reason))
            continue
        number = numbers.setdefault(item.class_name, len(numbers))
        if item.name is not None:
            names += os.fsencode(item.name)
            ends.append(len(names))
            met.append(number)
    if not met:
        shown = b"".join(report[:5]).decode("utf-8", "backslashreplace")
        raise ConfigurationError(
            f"{source} lists no image. Expected images in a folder for each class, or a CSV "
            f"file with a row for each image.\n{shown}"
        )
    if classes is None:
        known = set(first)
        new = [name for name in numbers if name not in known]
        classes = [*first, *sorted(new, key=int if _are_numbers(new) else None)]
        check_distinct(classes, source)
    labels = _class_numbers(numbers, classes, source)[np.frombuffer(met, np.int32)]
    order = np.argsort(labels, kind="stable")
    if not group_by_class:
        # the same seed for every set
        order = np.random.Generator(np.random.Philox(0)).permutation(len(labels))
    listed = Sources(
        folder=str(source if source.is_dir() else source.parent),
        classes=list(classes),
        left_out=len(report),
        report=b"".join(report),
        text=bytes(names),
        ends=np.frombuffer(ends, np.int64),
        labels=labels,
        stamps=np.zeros(len(labels), np.uint64),
        order=order,
    )
    return replace(listed, stamps=_stamps(listed))


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


def _stamps(sources: Sources) -> npt.NDArray[np.uint64]:
    """Of each file a number made of its length and time; 0 where there is none."""
    num = len(sources.labels)

    def look(first: int) -> list[int]:
        names = map(sources.name, range(first, min(first + _AT_ONCE, num)))
        return [_stamp(os.path.join(sources.folder, name)) for name in names]

    with ThreadPoolExecutor(_THREADS) as pool:
        stamps = chain.from_iterable(pool.map(look, range(0, num, _AT_ONCE)))
        return np.fromiter(stamps, np.uint64, num)


def _stamp(path: str) -> int:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # the packing says so when it comes to it
        return 0
    return (status.st_size * 0x9E3779B97F4A7C15 ^ status.st_mtime_ns) % 2**64
