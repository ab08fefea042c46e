"""Files that are there whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, through: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file that gets the name ``path`` when the block ends without an error, and is on the disk by then.

    ``through`` is where it is written until then (default: beside ``path``); removed if the block fails.
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
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Put the names in ``folder`` on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)
