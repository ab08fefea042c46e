"""Images and their classes, listed from a folder of class folders or from a CSV file."""

from __future__ import annotations

import csv
import os
from array import array
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import NamedTuple

import numpy as np

from lightning_ring.errors import ConfigurationError


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
