"""Changes of a set that write no image: each makes a generation, and leaves the ones before as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lightning_ring.data.packing.sources import check_distinct
from lightning_ring.data.sets.generation import following, images, write_generation
from lightning_ring.data.sets.lock import changing
from lightning_ring.data.sets.rows import SetRows
from lightning_ring.data.sets.select import rows_of, select
from lightning_ring.data.shards.columns import Column, check_name, column, kind_of, same
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ConfigurationError


def delete_images(root: Path, where: str | None = None, names: Sequence[str] = ()) -> Manifest:
    """Leave the images that ``where`` or ``names`` mean out of the next generation. Their bytes stay in the shards.

    Raises:
        ConfigurationError: There is no such image, or none would be left.
        ShardError: ``root`` is no set, or is damaged.
    """
    root = Path(root)
    with changing(root) as manifest:
        index = ShardIndex(root, manifest)
        before = set(index.deleted)
        gone = select(index, manifest, where, [name for name in names if name not in before])
        if not len(gone):
            return manifest  # they are deleted already
        is_kept = np.ones(manifest.samples, bool)
        is_kept[gone] = False
        kept = np.flatnonzero(is_kept)
        deleted = before.union(index.name(i) for i in gone.tolist())
        how = f"where {where}" if where else "by name"
        plan = following(manifest, f"delete {images(len(gone))} {how}")
        return write_generation(root, plan, [SetRows(root, manifest, kept)], manifest, deleted=deleted)


def relabel_images(
    root: Path,
    labels: Mapping[str, str] | None = None,
    where: str | None = None,
    to: str | None = None,
    new_classes: bool = False,
) -> Manifest:
    """Give images other classes: those of ``labels`` (a class for each name), or ``to`` for all that ``where`` means.

    Args:
        new_classes: Classes that the set does not have are added, at the end. Otherwise they are an error.

    Raises:
        ConfigurationError: There is no such image or class, or neither or both of ``labels`` and ``where`` were given.
        ShardError: ``root`` is no set, or is damaged.
    """
    if (labels is None) == (where is None) or (where is None) != (to is None):
        raise ConfigurationError("expected either LABELS.csv (labels), or --where EXPR and --to CLASS (where, to).")
    root = Path(root)
    with changing(root) as manifest:
        index = ShardIndex(root, manifest)
        if labels is not None:
            rows, names = rows_of(index, list(labels)), list(labels.values())
        else:
            rows = select(index, manifest, where)
            names = [str(to)] * len(rows)
        classes = _classes(root, manifest.classes, names, new_classes)
        numbers = {name: number for number, name in enumerate(classes)}
        changed = np.array(index.labels)
        changed[rows] = [numbers[name] for name in names]
        num = int((changed != index.labels).sum())
        if not num:
            return manifest  # they are of these classes already
        plan = following(manifest, f"relabel {images(num)}", classes=classes)
        return _write(root, plan, manifest, SetRows(root, manifest, labels=changed))


def _classes(root: Path, classes: list[str], names: Sequence[str], new_classes: bool) -> list[str]:
    strange = sorted(set(names) - set(classes))
    if strange and not new_classes:
        shown = ", ".join(map(repr, strange[:3])) + ", ..." * (len(strange) > 3)
        raise ConfigurationError(
            f"{root} has no class {shown}. Expected one of its {len(classes)} classes (`lightning-ring stat` lists "
            "them); --new-classes adds others."
        )
    check_distinct([*classes, *strange], root)
    return [*classes, *strange]


def annotate_images(
    root: Path, columns: Mapping[str, Mapping[str, Any]] | Callable[[str, str], Mapping[str, Any]]
) -> Manifest:
    """Give images metadata: for each column, values by the name of the image. Images without one keep what they have.

    Values are numbers, texts, lists of either, or lists of boxes (four numbers each); None is a missing value. A
    function is called with the name and the class name of every image, and gives its values by column.

    Raises:
        ConfigurationError: There is no such image, or values of one column are of several kinds.
        ShardError: ``root`` is no set, or is damaged.
    """
    root = Path(root)
    with changing(root) as manifest:
        index = ShardIndex(root, manifest)
        if callable(columns):
            columns = _by_function(columns, index, manifest.classes)
        names = list(dict.fromkeys(chain.from_iterable(columns.values())))
        rows = dict(zip(names, rows_of(index, names).tolist(), strict=True))
        found: dict[str, Column] = {}
        for name, values in columns.items():
            check_name(name)
            all_values = _values_now(index, name)
            for image, value in values.items():
                all_values[rows[image]] = value
            found[name] = column(kind_of(all_values, name), all_values)
        if all(same(found[name], index.metadata.get(name)) for name in found):
            return manifest
        whole = SetRows(root, manifest)
        whole.metadata = {**whole.metadata, **found}
        return _write(root, following(manifest, f"annotate {', '.join(found)}"), manifest, whole)


def _by_function(
    function: Callable[[str, str], Mapping[str, Any]], index: ShardIndex, classes: list[str]
) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for i in range(len(index)):
        name = index.name(i)
        for column_name, value in function(name, classes[index.labels[i]]).items():
            found.setdefault(column_name, {})[name] = value
    return found


def _values_now(index: ShardIndex, name: str) -> list[Any]:
    there = index.metadata.get(name)
    if there is None:
        return [None] * len(index)
    values = [there[i] for i in range(len(index))]
    if there.kind == "number":
        return [None if value != value else value for value in values]
    return [None if there.kind == "text" and value == "" else value for value in values]


def _write(root: Path, plan: Manifest, base: Manifest, rows: SetRows) -> Manifest:
    return write_generation(root, plan, [rows], base, deleted=rows.index.deleted)
