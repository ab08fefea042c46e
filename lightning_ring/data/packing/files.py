"""Writing files atomically, and the rows of ``report.csv``."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import BinaryIO

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
