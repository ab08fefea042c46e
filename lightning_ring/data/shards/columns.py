"""Metadata of images: a column has one value, or one list of values, for each image.

    kind      one value                       files in index/000000/columns
    number    float, NaN where there is none  NAME.npy (float64)
    text      str, "" where there is none     NAME.npy (int32, a place in the list), NAME.json (the list of texts)
    numbers   list of floats                  NAME.npy, NAME.ends.npy (int64: where the list of each image ends)
    texts     list of str                     NAME.npy, NAME.json, NAME.ends.npy
    boxes     list of four floats             NAME.npy (float32, 4 a row), NAME.ends.npy

Arrays are mapped into memory; the distinct texts of a column are read into it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any, Literal, SupportsIndex, get_args

import numpy as np
import numpy.typing as npt

from lightning_ring.errors import ConfigurationError

Kind = Literal["number", "text", "numbers", "texts", "boxes"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LISTS = ("numbers", "texts", "boxes")
TEXTS = ("text", "texts")
_DTYPES = {"number": "<f8", "text": "<i4", "numbers": "<f8", "texts": "<i4", "boxes": "<f4"}
OWN_NAMES = ("name", "label", "class_name", "bytes", "path")  # what an image has without metadata


@dataclass(frozen=True)
class Column:
    """``column[i]`` is a float, a str, a list of str, or an array of floats (boxes: n x 4)."""

    kind: Kind
    values: npt.NDArray[Any]
    ends: npt.NDArray[np.int64] | None = None  # lists only
    texts: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values if self.ends is None else self.ends)

    def __getitem__(self, i: SupportsIndex) -> Any:
        if self.ends is None:
            return self.texts[self.values[i]] if self.kind == "text" else float(self.values[i])
        at = range(len(self))[i]
        found = self.values[self.ends[at - 1] if at else 0 : self.ends[at]]
        return [self.texts[code] for code in found.tolist()] if self.kind == "texts" else found

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Of each image's list."""
        assert self.ends is not None
        return np.diff(self.ends, prepend=0)

    def take(self, rows: npt.NDArray[Any]) -> Column:
        """The values of ``rows``, ascending image numbers."""
        if self.ends is None:
            return replace(self, values=self.values[rows])
        kept = np.zeros(len(self), bool)
        kept[rows] = True
        return replace(self, values=self.values[np.repeat(kept, self.lengths)], ends=np.cumsum(self.lengths[rows]))


def column(kind: Kind, rows: Sequence[Any]) -> Column:
    """``rows`` (None: missing) as a column.

    Raises `ConfigurationError`: a value is not of ``kind``, or a number that a float64 cannot hold.
    """
    lists = [row if row is not None else [] for row in rows] if kind in LISTS else None
    items: list[Any] = [item for row in lists for item in row] if lists is not None else list(rows)
    ends = np.cumsum(np.fromiter(map(len, lists), np.int64, len(lists))) if lists is not None else None
    dtype = np.dtype(_DTYPES[kind])
    if kind in TEXTS:
        numbers: dict[str, int] = {}
        if kind == "text":
            items = ["" if item is None else item for item in items]
        for item in items:
            _require(isinstance(item, str), kind, item)
        codes = np.fromiter((numbers.setdefault(item, len(numbers)) for item in items), dtype, len(items))
        return Column(kind, codes, ends, tuple(numbers))
    if kind == "boxes":
        for item in items:
            _require(len(item) == 4 and all(map(_is_number, item)), kind, item)
        return Column(kind, np.array(items, dtype).reshape(-1, 4), ends)
    for item in items:
        _require((item is None and ends is None) or _is_number(item), kind, item)
    values = np.array([np.nan if item is None else item for item in items], dtype)
    return Column(kind, values, ends)


def _is_number(item: object) -> bool:
    if isinstance(item, (bool, np.bool_, float, np.floating)):
        return True
    return isinstance(item, (int, np.integer)) and abs(int(item)) <= 2**53


def _require(right: bool, kind: str, item: object) -> None:
    if not right:
        expected = {
            **dict.fromkeys(("number", "numbers"), "a number (integers up to 2^53; give longer ones as text)"),
            **dict.fromkeys(("text", "texts"), "text"),
            "boxes": "four numbers a box",
        }
        raise ConfigurationError(f"{item!r} is no value of a column of {kind}: expected {expected[kind]}.")


def kind_of(rows: Sequence[Any], name: str) -> Kind:
    """The kind that all ``rows`` (None: missing) fit.

    Raises `ConfigurationError`: there is none.
    """
    found = {_kind_of_value(row) for row in rows} - {None, "empty"}
    if not found:
        return "numbers" if any(isinstance(row, (list, tuple, np.ndarray)) for row in rows) else "number"
    if len(found) == 1 and (kind := found.pop()) in KINDS:
        return kind
    examples = {_kind_of_value(row): row for row in rows if row is not None}
    shown = ", ".join(f"{kind} ({row!r})" for kind, row in sorted(examples.items(), key=str) if kind != "empty")
    raise ConfigurationError(f"the column {name!r} holds {shown}. Expected one kind: {', '.join(KINDS)}.")


def _kind_of_value(row: Any) -> Any:
    if row is None:
        return None
    if isinstance(row, str):
        return "text"
    if isinstance(row, (bool, int, float, np.generic)):
        return "number"
    if isinstance(row, (list, tuple, np.ndarray)):
        if not len(row):
            return "empty"
        first = row[0]
        if isinstance(first, (list, tuple, np.ndarray)):
            return "boxes"
        return "texts" if isinstance(first, str) else "numbers"
    return type(row).__name__


def missing(kind: Kind, num: int) -> Column:
    """``num`` images without a value."""
    return column(kind, [None] * num)


def joined(parts: Sequence[Column]) -> Column:
    """Columns of one kind, one after the other."""
    kind = parts[0].kind
    numbers: dict[str, int] = {}
    values, ends, total = [], [], 0
    for part in parts:
        if kind in TEXTS:
            new = np.array([numbers.setdefault(text, len(numbers)) for text in part.texts] or [0], "<i4")
            values.append(new[part.values])
        else:
            values.append(part.values)
        if part.ends is not None:
            ends.append(part.ends + total)
            total += len(part.values)
    return Column(kind, np.concatenate(values), np.concatenate(ends) if ends else None, tuple(numbers))


def same(column: Column, other: Column | None) -> bool:
    """Whether they hold the same values."""
    if other is None or (column.kind, column.texts) != (other.kind, other.texts):
        return False
    is_float = column.values.dtype.kind == "f"
    return np.array_equal(column.values, other.values, equal_nan=is_float) and (
        column.ends is None or np.array_equal(column.ends, other.ends)  # type: ignore[arg-type]
    )


def check_name(name: str) -> None:
    """Raises `ConfigurationError`: an expression could not name this column."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name in OWN_NAMES or iskeyword(name):
        own = ", ".join(OWN_NAMES)
        raise ConfigurationError(
            f"{name!r} is no name of a column: expected a letter, then letters, digits and _; no word of Python's, "
            f"and none of {own}."
        )


def file_names(name: str, kind: str) -> list[str]:
    """Files of a column, below the folder of an index: values, ends, texts."""
    stem = f"columns/{name}"
    return [
        f"{stem}.npy",
        *([f"{stem}.ends.npy"] if kind in LISTS else []),
        *([f"{stem}.json"] if kind in TEXTS else []),
    ]


def load_column(name: str, kind: Kind, array: Callable[[str], npt.NDArray[Any]], texts: Callable[[str], Any]) -> Column:
    """Read a column; ``array`` and ``texts`` read a file of the index by its name."""
    values = array(f"columns/{name}.npy")
    ends = array(f"columns/{name}.ends.npy") if kind in LISTS else None
    return Column(kind, values, ends, tuple(texts(f"columns/{name}.json")) if kind in TEXTS else ())
