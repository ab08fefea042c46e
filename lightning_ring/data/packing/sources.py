"""The images of a packing and their labels, from a folder of class folders or a CSV file, listed
once and kept on the disk.

A list takes some 40 bytes of memory an image. A resumed packing lists the source again, and goes on
if it is the same.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path, PurePath
from typing import Any, BinaryIO, NamedTuple

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


@contextmanager
def whole_file(path: Path, through: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file that gets the name ``path`` when the block ends without an error, and is on the
    disk by then.

    ``through`` is where it is written until then (default: beside ``path``); removed if the block
    fails.
    """
    part = through or path.with_name(path.name + ".part")
    try:
        with open(part, "wb", buffering=2**20) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)  # the name, too, is on the disk


def sync_folder(folder: Path) -> None:
    """Names that were made in ``folder`` are on the disk when this returns."""
    if os.name == "nt":
        return  # Windows opens no folders
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)


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
    ``folder``.

    Raises `OSError`: a folder cannot be read.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_dir():
            yield LeftOut(entry.name, "not in a class folder")
        elif entry.name.startswith("."):
            yield LeftOut(entry.name, "a hidden folder is no class")
        else:
            yield Found(None, entry.name)
            yield from _scan_class(folder, entry.name)


def _scan_class(folder: Path, class_name: str) -> Iterator[Found | LeftOut]:
    loops: list[LeftOut] = []
    # sorted() as ImageFolder has it, which is not the order of a walk through sorted folders ("a-b"
    # before "a/c").
    for root, files in sorted(_walk(str(folder), class_name, loops)):
        for file in sorted(files):
            name = os.path.relpath(os.path.join(root, file), folder)
            if file.lower().endswith(EXTENSIONS):
                yield Found(name, class_name)
            else:
                yield LeftOut(
                    name,
                    f"its extension is none of {' '.join(EXTENSIONS)}; a CSV can "
                    "list it all the same",
                )
    yield from loops


def _walk(folder: str, class_name: str, loops: list[LeftOut]) -> Iterator[tuple[str, list[str]]]:
    """The folders at and below ``folder/class_name``, with their files. Links are followed.

    Those that lead back to a folder that they are in are not: they are added to ``loops``.
    """

    def fail(error: OSError) -> None:
        raise error  # os.walk would leave a folder that it cannot read out without a word

    for root, folders, files in os.walk(
        os.path.join(folder, class_name), onerror=fail, followlinks=True
    ):
        here = os.path.realpath(root) + os.sep
        for name in list(folders):
            path = os.path.join(root, name)
            if os.path.islink(path) and here.startswith(os.path.realpath(path) + os.sep):
                folders.remove(name)
                loops.append(
                    LeftOut(os.path.relpath(path, folder), "a link to a folder that it is in")
                )
        yield root, files


class _Row(NamedTuple):
    line: int
    path: str  # in one spelling: two of one file are one image
    label: str


def read_csv(file: Path) -> Iterator[Found | LeftOut]:
    """An image for each row; rows without path or label, and repeated ones, by line. Paths are
    relative to ``file``.

    ``./a.jpg`` and ``a.jpg`` are one path, as are ``a//b.jpg`` and ``a/b.jpg``; links are not
    followed. Raises `ConfigurationError`: the first line lacks the columns, the file is not CSV, or
    a path has two labels.
    """
    repeated = _repeated_paths(file)
    first: dict[str, _Row] = {}
    for row in _rows(file):
        if not row.path or not row.label:
            missing = "label" if row.path else "path"
            yield LeftOut(row.path or file.name, f"line {row.line} of {file.name} has no {missing}")
            continue
        if hash(row.path) in repeated:
            earlier = first.setdefault(row.path, row)
            if earlier.label != row.label:
                raise ConfigurationError(
                    f"{file} gives {row.path!r} two labels: {earlier.label!r} in line "
                    f"{earlier.line}, {row.label!r} in line {row.line}. Remove one of the lines."
                )
            if earlier is not row:
                yield LeftOut(
                    row.path, f"line {row.line} of {file.name} repeats line {earlier.line}"
                )
                continue
        yield Found(row.path, row.label)


def _one_spelling(path: str) -> str:
    """``./a//b.jpg`` and ``a/b.jpg`` are one path; ``..`` stays: behind a link it leads
    elsewhere.
    """
    path = path.strip()
    return str(PurePath(path)) if "./" in path or "//" in path else path


def _repeated_paths(file: Path) -> set[int]:
    """Hashes of the paths that occur twice: 8 bytes a row, where a dict of all paths would take
    some 200.
    """
    hashes = np.frombuffer(array("q", (hash(row.path) for row in _rows(file))), np.int64)
    hashes = np.sort(hashes)
    return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())


def _rows(file: Path) -> Iterator[_Row]:
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as text:
        reader = csv.reader(text)
        try:
            columns = [cell.strip().lower() for cell in next(reader, [])]
            if columns.count("path") != 1 or columns.count("label") != 1:
                raise ConfigurationError(
                    f"{file} starts with the columns {columns}, expected path and label. Write "
                    "`path,label` as its first line; paths are relative to its folder, or "
                    "absolute."
                )
            path, label = columns.index("path"), columns.index("label")
            for cells in reader:
                if cells:
                    cells += [""] * len(columns)
                    yield _Row(reader.line_num, _one_spelling(cells[path]), cells[label].strip())
        except csv.Error as error:
            raise ConfigurationError(
                f"{file}, line {reader.line_num}, is not CSV: {error}."
            ) from None


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


def read_classes(file: Path) -> list[str]:
    """Names of classes in the order of their numbers: a line each, or those of the
    ``manifest.json`` of other shards.

    Raises `ConfigurationError`: it cannot be read, names no class, or one twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
        classes = json.loads(text)["classes"] if file.suffix == ".json" else text.split("\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--classes {file} cannot be read: {error}. Expected a text file with the name of a "
            "class in each line, or the manifest.json of packed shards."
        ) from None
    if file.suffix != ".json":
        classes = [line.rstrip("\r") for line in classes]
        while classes and not classes[-1]:
            classes.pop()
    if not classes or "" in classes:
        where = f"line {classes.index('') + 1} is empty" if classes else "it is empty"
        raise ConfigurationError(
            f"--classes {file}: {where}. Expected the name of a class in each line."
        )
    check_distinct(classes, file)
    return list(classes)
