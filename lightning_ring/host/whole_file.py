"""Files that are whole, or not there under their name."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path, through: Path | None = None) -> Iterator[BinaryIO]:
    """Open a file that gets the name ``path`` when the block ends without an error, and is on the
    disk by then.

    ``through`` is where it is written until then (default: beside ``path``); removed if the block
    fails. It is a new file: where others may write to the folder, a link that they put there is
    removed, not followed.
    """
    part = through or path.with_name(path.name + ".part")
    part.unlink(missing_ok=True)
    try:
        with open(part, "xb", buffering=2**20) as file:
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
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_whole(path: Path, data: bytes) -> None:
    with whole_file(path) as file:
        file.write(data)
