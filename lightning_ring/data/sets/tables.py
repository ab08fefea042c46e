"""Tables of images: labels and metadata from CSV and Parquet, and a set as CSV."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, TextIO

import numpy as np

from lightning_ring.data.packing.listing import LeftOut, read_csv
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.expressions import matching
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.errors import ConfigurationError


def read_labels(file: Path) -> dict[str, str]:
    """The label of each path of a CSV with these two columns.

    Raises `ConfigurationError`: it is no such file, a row has no path or label, or a path has two labels.
    """
    labels = {}
    for item in read_csv(_existing(file)):
        if isinstance(item, LeftOut):
            raise ConfigurationError(f"{file}: {item.name}: {item.reason}. Give each path once, with its label.")
        assert item.name is not None
        labels[item.name] = item.class_name
    return labels


def read_table(file: Path, columns: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Values by column and path, of a CSV or a Parquet file with the column ``path``; None where a cell is empty.

    Raises `ConfigurationError`: it cannot be read, lacks a column, or has a path twice.
    """
    read = _parquet_rows if _existing(file).suffix in (".parquet", ".pq") else _csv_rows
    header, rows = read(file)
    if header.count("path") != 1 or len(set(header)) < len(header):
        raise ConfigurationError(f"{file} has the columns {header}. Expected `path` and others, each once.")
    wanted = [name for name in header if name not in ("path", "label")] if columns is None else list(columns)
    if absent := [name for name in wanted if name not in header]:
        raise ConfigurationError(f"{file} has no column {absent[0]!r}; it has {', '.join(header)}.")
    if not wanted:
        raise ConfigurationError(f"{file} has no column besides path and label. `lightning-ring relabel` reads labels.")
    at, places = header.index("path"), [header.index(name) for name in wanted]
    found: dict[str, dict[str, Any]] = {name: {} for name in wanted}
    first = found[wanted[0]]
    for row in rows:
        path = row[at]
        if not path or path in first:
            raise ConfigurationError(f"{file} {f'has {path!r} twice' if path else 'has a row without a path'}.")
        for name, place in zip(wanted, places, strict=True):
            found[name][path] = row[place]
    return found


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ConfigurationError(f"{file} is not there. Expected a table with the column path.")
    return file


def _csv_rows(file: Path) -> tuple[list[str], list[list[Any]]]:
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as text:
        reader = csv.reader(text)
        try:
            header = [name.strip() for name in next(reader, [])]
            header = ["path" if name.lower() == "path" else name for name in header]
            rows = [row for row in reader if row]
        except csv.Error as error:
            raise ConfigurationError(f"{file}, line {reader.line_num}, is not CSV: {error}.") from None
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise ConfigurationError(f"{file}: row {number + 1} has {len(row)} cells, expected {len(header)}.")
    columns = [_typed([row[i] for row in rows]) if name != "path" else _paths(rows, i) for i, name in enumerate(header)]
    return header, [list(row) for row in zip(*columns, strict=True)]


def _paths(rows: list[list[str]], i: int) -> list[str]:
    """In one spelling, as packing has them."""
    paths = [row[i].strip() for row in rows]
    return [str(PurePath(path)) if "./" in path or "//" in path else path for path in paths]


def _typed(cells: list[str]) -> list[Any]:
    """Numbers if all cells are JSON numbers, lists if all are JSON lists, else texts: "007" stays what it is."""
    values: list[Any] = []
    kinds = set()
    for cell in cells:
        try:
            value = json.loads(cell) if cell.strip() else None
        except (ValueError, RecursionError):
            value = cell
        if value is not None:
            is_number = isinstance(value, float) or (type(value) is int and abs(value) <= 2**53)
            kinds.add("number" if is_number else "list" if isinstance(value, list) else "text")
        values.append(value)
    if len(kinds) <= 1 and kinds != {"text"}:
        return values
    return [cell if cell else None for cell in cells]


def _parquet_rows(file: Path) -> tuple[list[str], list[list[Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigurationError(f"{file} cannot be read as Parquet: {error}.") from None
    columns = [column.to_pylist() for column in table.columns]
    return list(table.column_names), [list(row) for row in zip(*columns, strict=True)]


def write_table(
    out: TextIO,
    root: Path,
    where: str | None = None,
    columns: Sequence[str] | None = None,
    generation: int | None = None,
    limit: int | None = None,
) -> None:
    """Write path, label and metadata of the images of a set as CSV.

    Raises:
        ConfigurationError: ``where`` is no expression, or a column is not there.
        ShardError: ``root`` is no set, or lacks this generation.
    """
    manifest = read_manifest(root, generation)
    index = ShardIndex(root, manifest)
    wanted = list(index.metadata) if columns is None else list(columns)
    if absent := [name for name in wanted if name not in index.metadata]:
        raise ConfigurationError(f"{root} has no column {absent[0]!r}; it has {', '.join(index.metadata) or 'none'}.")
    rows = np.arange(len(index)) if where is None else matching(where, index, manifest.classes)
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["path", "label", *wanted])
    for i in islice(rows.tolist(), limit):
        cells = [_cell(index.metadata[name], i) for name in wanted]
        row = [index.name(i), manifest.classes[index.labels[i]], *cells]
        writer.writerow([cell.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for cell in row])


def _cell(column: Column, i: int) -> str:
    value = column[i]
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{int(value)}" if value.is_integer() else repr(value)
    return json.dumps(value if isinstance(value, list) else value.tolist()) if len(value) else ""
