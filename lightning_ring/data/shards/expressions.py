"""Filters: an expression over the index says which images are meant, and no image is read.

    width > 300 and class_name in ("cat", "dog") and "night" in tags

An expression is parsed by Python's parser, and walked here: it can call nothing but the functions below, and reach no
attribute. (No library that this package needs reads one from a text, but by running it.) Names are ``name``, ``label``
(a number), ``class_name``, ``bytes`` (of the encoded image) and the columns of the metadata. A text is looked at once
for each distinct value, not once for each image.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.shards.columns import LISTS, Column
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.errors import ConfigurationError

_AT_ONCE = 1 << 18  # images
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FLIPPED = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_TEXT_FUNCTIONS: dict[str, Callable[[str, str], bool]] = {
    "startswith": str.startswith,
    "endswith": str.endswith,
    "contains": lambda text, part: part in text,
    "matches": lambda text, pattern: re.search(pattern, text) is not None,
}
FUNCTIONS = ("len", "missing", *_TEXT_FUNCTIONS)


def matching(where: str, index: ShardIndex, classes: list[str]) -> npt.NDArray[np.int64]:
    """The numbers of the images for which ``where`` is true, ascending.

    Raises `ConfigurationError`: it is no expression, names something that is not there, or compares unlike kinds.
    """
    try:
        tree = ast.parse(where.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _wrong(where, f"it is no expression ({error})") from None
    found = []
    for start in range(0, max(1, len(index)), _AT_ONCE):
        rows = slice(start, min(start + _AT_ONCE, len(index)))
        try:
            with np.errstate(all="ignore"):  # a division by zero is no number, and no match
                result = _Rows(where, index, classes, rows).value(tree)
        except (OverflowError, RecursionError) as error:
            raise _wrong(where, f"it cannot be computed ({error})") from None
        if not isinstance(result, np.ndarray) or result.dtype != bool:
            raise _wrong(where, "it is not true or false for an image; expected a comparison, such as `width > 300`")
        found.append(start + np.flatnonzero(result))
    return np.concatenate(found)


def _wrong(where: str, why: str) -> ConfigurationError:
    return ConfigurationError(f"where={where!r}: {why}.")


@dataclass(frozen=True)
class _Rows:
    """Evaluates an expression for some images: to an array of numbers or of bools, to a `Column`, or to a constant."""

    where: str
    index: ShardIndex
    classes: list[str]
    rows: slice

    def value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, (str, int, float)):
            return node.value
        if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
            return self._constants(node)
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.BoolOp):
            parts = [self._truth(part) for part in node.values]
            return (np.logical_and if isinstance(node.op, ast.And) else np.logical_or).reduce(parts)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return ~self._truth(node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            return _ARITHMETIC[type(node.op)](self._number(node.left), self._number(node.right))
        if isinstance(node, ast.Compare):
            return self._comparison(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
            return self._call(node, node.func.id)
        raise self._error(
            node,
            "is not understood: expected names, constants, comparisons, and, or, not, in, + - * / %, "
            f"{', '.join(FUNCTIONS)}",
        )

    def _error(self, node: ast.AST, why: str) -> ConfigurationError:
        return _wrong(self.where, f"`{ast.unparse(node)}` {why}")

    def _constants(self, node: ast.Tuple | ast.List | ast.Set) -> tuple[Any, ...]:
        found = tuple(self.value(item) for item in node.elts)
        if not all(isinstance(item, (str, int, float)) for item in found):
            raise self._error(node, "is a list of things that are no constants")
        return found

    def _named(self, name: str) -> Any:
        if name == "label":
            return self.index.labels[self.rows]
        if name == "class_name":
            return _that_occur(Column("text", self.index.labels[self.rows], None, tuple(self.classes)))
        if name == "bytes":
            return self.index.column("places")[self.rows, 1].astype(np.int64)
        if name == "name":
            texts = tuple(self.index.names_in(self.rows))
            return Column("text", np.arange(len(texts)), None, texts)
        column = self.index.metadata.get(name)
        if column is None:
            there = ", ".join(["name", "label", "class_name", "bytes", *self.index.metadata])
            raise _wrong(self.where, f"there is no {name!r}; the index has {there}")
        if column.kind == "number":
            return column.values[self.rows]
        if column.ends is None:
            return _that_occur(Column("text", column.values[self.rows], None, column.texts))
        first = int(column.ends[self.rows.start - 1]) if self.rows.start else 0
        ends = column.ends[self.rows] - first
        last = int(ends[-1]) if len(ends) else 0
        return _that_occur(Column(column.kind, column.values[first : first + last], ends, column.texts))

    def _truth(self, node: ast.expr) -> npt.NDArray[np.bool_]:
        found = self.value(node)
        if not isinstance(found, np.ndarray) or found.dtype != bool:
            raise self._error(node, "is not true or false; compare it with something")
        return found

    def _number(self, node: ast.expr) -> Any:
        found = self.value(node)
        if isinstance(found, (Column, str, tuple)) or getattr(found, "dtype", None) == np.bool_:
            raise self._error(node, "is no number")
        return np.float64(found)  # of an array: an array

    def _comparison(self, node: ast.Compare) -> npt.NDArray[np.bool_]:
        values = [node.left, *node.comparators]
        parts = [
            self._compare(node, self.value(left), symbol, self.value(right))
            for left, symbol, right in zip(values, node.ops, values[1:], strict=False)
        ]
        return np.asarray(np.logical_and.reduce(parts), bool)

    def _compare(self, node: ast.Compare, left: Any, symbol: ast.cmpop, right: Any) -> npt.NDArray[np.bool_]:
        if isinstance(symbol, (ast.In, ast.NotIn)):
            found = self._contains(node, right, left)
            return found if isinstance(symbol, ast.In) else ~found
        compare = _COMPARE.get(type(symbol))
        if compare is None:
            raise self._error(node, "is not understood: `is` compares nothing here")
        if isinstance(right, (Column, np.ndarray)) and not isinstance(left, (Column, np.ndarray)):
            left, right, compare = right, left, _FLIPPED.get(compare, compare)
        if isinstance(left, np.ndarray) and isinstance(right, (int, float, np.ndarray)):
            return np.asarray(compare(left, right), bool)
        if isinstance(left, Column) and left.kind == "text" and isinstance(right, str):
            return _by_text(left, lambda text: compare(text, right))
        if isinstance(left, Column) and isinstance(right, Column) and left.kind == right.kind == "text":
            pairs = zip(left.values.tolist(), right.values.tolist(), strict=True)
            return np.array([compare(left.texts[a], right.texts[b]) for a, b in pairs], bool)
        raise self._error(node, "compares unlike things: expected two numbers, or two texts")

    def _contains(self, node: ast.Compare, container: Any, item: Any) -> npt.NDArray[np.bool_]:
        if isinstance(container, tuple) and isinstance(item, np.ndarray) and not _texts(container):
            return np.isin(item, np.array(container, np.float64))
        if isinstance(container, tuple) and _is_text(item) and all(isinstance(each, str) for each in container):
            return _by_text(item, lambda text: text in container)
        if _is_text(container) and isinstance(item, str):
            return _by_text(container, lambda text: item in text)
        if isinstance(container, Column) and container.ends is not None:
            if container.kind == "texts" and isinstance(item, str):
                return _any_of(container, _by_text(container, lambda text: text == item))
            if container.kind == "numbers" and isinstance(item, (int, float)):
                return _any_of(container, container.values == item)
        raise self._error(node, "looks for unlike things: expected a text in texts, or a number in numbers")

    def _call(self, node: ast.Call, function: str) -> npt.NDArray[Any]:
        arguments = [self.value(argument) for argument in node.args]
        if function == "len" and len(arguments) == 1 and isinstance(arguments[0], Column):
            (column,) = arguments
            if column.kind in LISTS:
                return column.lengths
            return np.array([len(text) for text in column.texts] or [0])[column.values]
        if function == "missing" and len(arguments) == 1:
            (column,) = arguments
            if isinstance(column, np.ndarray) and column.dtype != bool:
                return np.isnan(column)
            if isinstance(column, Column):
                return column.lengths == 0 if column.ends is not None else _by_text(column, lambda text: not text)
        if function in _TEXT_FUNCTIONS and len(arguments) == 2 and _is_text(arguments[0]):
            column, pattern = arguments
            test = _TEXT_FUNCTIONS[function]
            try:
                if isinstance(pattern, str):
                    return _by_text(column, lambda text: test(text, pattern))
            except re.error as error:
                raise self._error(node, f"has a pattern that is no regular expression ({error})") from None
        raise self._error(
            node,
            "is not understood: expected len(texts), missing(column), or one of "
            f"{', '.join(_TEXT_FUNCTIONS)} of a text and a constant text",
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, Column) and value.kind == "text"


def _texts(values: tuple[Any, ...]) -> bool:
    return any(isinstance(value, str) for value in values)


def _that_occur(column: Column) -> Column:
    """``column`` without the texts that it does not have, where they are many: each text is looked at."""
    if len(column.texts) <= len(column.values):
        return column
    codes, values = np.unique(column.values, return_inverse=True)
    return replace(column, values=values, texts=tuple(column.texts[code] for code in codes.tolist()))


def _by_text(column: Column, test: Callable[[str], bool]) -> npt.NDArray[np.bool_]:
    """``test`` for every value, run once for each distinct text."""
    return np.array([bool(test(text)) for text in column.texts] or [False])[column.values]


def _any_of(column: Column, found: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Whether one at least of the values of each image is ``found``."""
    counts = np.concatenate([[0], np.cumsum(found)])
    assert column.ends is not None
    return np.diff(counts[column.ends], prepend=0) > 0
