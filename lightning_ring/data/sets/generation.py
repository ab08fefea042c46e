"""Writes a generation: its index in a folder of its own, then the manifest in the place of the one before.

Whatever ends it before the manifest has its new name leaves the old generation as it was; the same change can then be
made again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import sync_folder, whole_file, write_whole
from lightning_ring.data.sets.rows import Rows, SetRows
from lightning_ring.data.shards.columns import Column, file_names, joined, missing
from lightning_ring.data.shards.index import COLUMNS, DELETED, NAMES
from lightning_ring.data.shards.manifest import MANIFEST, REPORT, Manifest, file_sha256, read_manifest
from lightning_ring.errors import ConfigurationError

_PLAIN = ("labels", "places", "stamps")


def following(base: Manifest, change: str, **others: Any) -> Manifest:
    """The plan of the generation after ``base``, that ``change`` makes."""
    return replace(
        base,
        generation=base.generation + 1,
        change=change,
        counts={},
        next_shard=base.free_shard,
        next_key=base.free_key,
        **others,
    )


@contextmanager
def new_shards(root: Path, base: Manifest | None) -> Iterator[list[str]]:
    """A list for the names of shards that a change of ``base`` has made in ``root``.

    They are removed if the block fails before it has made a generation: a disk that is full stays full otherwise.
    """
    names: list[str] = []
    try:
        yield names
    except BaseException:
        made = read_manifest(root).generation if (root / MANIFEST).exists() else None
        if made == (None if base is None else base.generation):
            for name in names:
                (root / name).unlink(missing_ok=True)
        raise


def write_generation(
    root: Path,
    plan: Manifest,
    parts: Sequence[Rows],
    base: Manifest | None = None,
    report: Iterable[bytes] = (),
    deleted: Collection[str] = (),
) -> Manifest:
    """Write the index of ``parts``, one after the other, and the manifest, last.

    Args:
        plan: The manifest, without shards, files and columns.
        base: That of the generation before.
        report: Rows of a report. The first generation's lies beside the shards, others in their index.
        deleted: Names of images that were deleted, now or earlier.

    Raises:
        ConfigurationError: ``parts`` hold no image, or columns that do not go together.
    """
    if not sum(map(len, parts)):
        raise ConfigurationError(f"{root}: no image would be left. A set has one at least; remove its folder instead.")
    metadata = joined_metadata(parts)
    index = root / plan.index
    shutil.rmtree(index, ignore_errors=True)  # of a change that never finished
    index.mkdir(parents=True)
    sync_folder(index.parent)
    manifest = replace(
        plan,
        shards=[shard for part in parts for shard in part.shards],
        files={} if base is None else {name: sha256 for name, sha256 in base.files.items() if "/" not in name},
        columns={name: column.kind for name, column in metadata.items()},
    )
    written = _write_rows(index, parts)
    if metadata:
        (index / "columns").mkdir()
    for name, column in sorted(metadata.items()):
        written += _write_metadata(index, name, column)
    if deleted:
        write_whole(index / DELETED, json.dumps(sorted(deleted)).encode())
        written.append(DELETED)
    report = list(report)
    names = [f"{plan.index}/{name}" for name in written]
    if report:
        place = REPORT if plan.generation == 0 else f"{plan.index}/{REPORT}"
        with whole_file(root / place) as file:
            file.writelines(report)
        names.append(place)
    manifest.files.update((name, file_sha256(root / name)) for name in sorted(names))
    text = manifest.to_json().encode()
    write_whole(index / MANIFEST, text)  # of this generation, when there is a later one
    write_whole(root / MANIFEST, text)
    return manifest


def _write_rows(index: Path, parts: Sequence[Rows]) -> list[str]:
    """The names of the files that were written."""
    total = sum(map(len, parts))
    whole = parts[0] if len(parts) == 1 and isinstance(parts[0], SetRows) else None
    written = []
    for name in _PLAIN:
        written.append(f"{name}.npy")
        if whole is None or not whole.give(f"{name}.npy", index):
            with whole_file(index / f"{name}.npy") as file:
                _write_array(file, name, total, (piece for part in parts for piece in part.column(name)))
    written += [NAMES, "name_ends.npy"]
    if whole is None or not all(whole.give(name, index) for name in (NAMES, "name_ends.npy")):
        _write_names(index, total, parts)
    return written


def _write_array(file: BinaryIO, name: str, total: int, pieces: Iterable[npt.NDArray[Any]]) -> None:
    dtype, width = COLUMNS[name]
    shape = (total, width)[: 1 + (width > 1)]
    np.lib.format.write_array_header_1_0(file, {"descr": dtype.str, "fortran_order": False, "shape": shape})
    for piece in pieces:
        file.write(np.ascontiguousarray(piece, dtype).data)


def _write_names(index: Path, total: int, parts: Sequence[Rows]) -> None:
    """One name a line. A name may hold a line feed, so readers go by the ends."""

    def ends(names: BinaryIO) -> Iterator[npt.NDArray[np.int64]]:
        at = 0
        for part in parts:
            for text, lengths in part.names():
                names.write(text)
                yield at + np.cumsum(lengths + 1) - 1
                at += len(text)

    with whole_file(index / NAMES) as names, whole_file(index / "name_ends.npy") as file:
        _write_array(file, "name_ends", total, ends(names))


def images(number: int) -> str:
    return "1 image" if number == 1 else f"{number} images"


def joined_metadata(parts: Sequence[Rows]) -> dict[str, Column]:
    """Columns of all ``parts``. Raises `ConfigurationError`: one is of several kinds, or names are too alike."""
    found: dict[str, Column] = {}
    names = sorted({name for part in parts for name in part.metadata}, key=lambda name: (name.casefold(), name))
    if same := next(((a, b) for a, b in pairwise(names) if a.casefold() == b.casefold()), None):
        raise ConfigurationError(
            f"there would be the columns {same[0]!r} and {same[1]!r}, which some file systems take for one. Give one "
            "of them another name."
        )
    for name in names:
        kinds = {part.metadata[name].kind for part in parts if name in part.metadata}
        if len(kinds) > 1:
            raise ConfigurationError(
                f"the column {name!r} holds {' and '.join(sorted(kinds))} in these sets. Annotate one of them anew, so "
                "that a column is of one kind."
            )
        (kind,) = kinds
        columns = [part.metadata[name] if name in part.metadata else missing(kind, len(part)) for part in parts]
        found[name] = columns[0] if len(columns) == 1 else joined(columns)
    return found


def _write_metadata(index: Path, name: str, column: Column) -> list[str]:
    files = file_names(name, column.kind)
    contents = [column.values, *([] if column.ends is None else [column.ends.astype("<i8")])]
    for file_name, array in zip(files, contents, strict=False):
        with whole_file(index / file_name) as file:
            np.save(file, array)
    if files[-1].endswith(".json"):
        write_whole(index / files[-1], json.dumps(column.texts).encode())
    return files
