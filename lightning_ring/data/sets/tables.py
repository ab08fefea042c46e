"""Tables of images: labels and metadata from CSV and Parquet, and a set as CSV."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from lightning_ring.data.packing.listing import LeftOut, one_spelling, read_csv
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.expressions import matching
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import read_manifest
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.file_names import printable


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
    header, columns_of = (_parquet if _existing(file).suffix in (".parquet", ".pq") else _csv)(file)
    if header.count("path") != 1 or len(set(header)) < len(header):
        raise ConfigurationError(f"{file} has the columns {header}. Expected `path` and others, each once.")
    wanted = [name for name in header if name not in ("path", "label")] if columns is None else list(columns)
    if absent := [name for name in wanted if name not in header]:
        raise ConfigurationError(f"{file} has no column {absent[0]!r}; it has {', '.join(header)}.")
    if not wanted:
        raise ConfigurationError(f"{file} has no column besides path and label. `lightning-ring relabel` reads labels.")
    by_name = dict(zip(header, columns_of, strict=True))
    paths = ["" if path is None else one_spelling(str(path)) for path in by_name["path"]]
    if "" in paths:
        raise ConfigurationError(f"{file} has a row without a path.")
    if len(set(paths)) < len(paths):
        raise ConfigurationError(f"{file} has {Counter(paths).most_common(1)[0][0]!r} twice.")
    return {name: dict(zip(paths, by_name[name], strict=True)) for name in wanted}


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise ConfigurationError(f"{file} is not there. Expected a table with the column path.")
    return file


def _csv(file: Path) -> tuple[list[str], list[list[Any]]]:
    """The header, and the values of each column."""
    with open(file, newline="", encoding="utf-8-sig", errors="surrogateescape") as text:
        reader = csv.reader(text)
        try:
            header = _header(name.strip() for name in next(reader, []))
            rows = [row for row in reader if row]
        except csv.Error as error:
            raise ConfigurationError(f"{file}, line {reader.line_num}, is not CSV: {error}.") from None
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise ConfigurationError(f"{file}: row {number + 1} has {len(row)} cells, expected {len(header)}.")
    columns = ([row[i] for row in rows] for i in range(len(header)))
    return header, [cells if name == "path" else _typed(cells) for name, cells in zip(header, columns, strict=True)]


def _header(names: Iterable[str]) -> list[str]:
    """``Path`` and ``LABEL`` are the columns that packing takes for path and label."""
    return [name.lower() if name.lower() in ("path", "label") else name for name in names]


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


def _parquet(file: Path) -> tuple[list[str], list[list[Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigurationError(f"{file} cannot be read as Parquet: {error}.") from None
    return _header(table.column_names), [column.to_pylist() for column in table.columns]


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
        writer.writerow([printable(cell) for cell in row])


def _cell(column: Column, i: int) -> str:
    value = column[i]
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return "" if np.isnan(value) else f"{int(value)}" if value.is_integer() else repr(value)
    return json.dumps(value if isinstance(value, list) else value.tolist()) if len(value) else ""
