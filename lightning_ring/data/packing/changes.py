"""What is different in a source that was packed, or half packed, before."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.shards import Manifest, ShardIndex
from lightning_ring.errors import ConfigurationError

Places = npt.NDArray[Any]


class Listed(NamedTuple):
    """Files with the numbers of their classes and their stamps."""

    classes: list[str]
    labels: npt.NDArray[np.int32]
    stamps: npt.NDArray[np.uint64]
    name: Callable[[int], str]


def of_sources(sources: Sources) -> Listed:
    def name(i: int) -> str:
        return os.fsdecode(sources.listed_name(i))

    return Listed(sources.classes, np.asarray(sources.labels), np.asarray(sources.stamps), name)


def of_set(root: Path, manifest: Manifest) -> Listed:
    index = ShardIndex(root, manifest)
    return Listed(manifest.classes, index.labels, index.column("stamps"), index.name)


def already_there(was: Listed, now: Listed, target: Path) -> npt.NDArray[np.bool_]:
    """For each image of ``now`` whether ``was`` has it, by its name.

    Raises `ConfigurationError`: the name is there with another class, length or time.
    """
    old, new = _in_both(was, now)
    if found := "; ".join(_changed(was, now, old, new)):
        raise ConfigurationError(
            f"{target} has images of these names that are others: {found}. Nothing was written. "
            "Give new images other names, or pack them into another folder (`Mixture` reads "
            "several); a packed image never changes."
        )
    there = np.zeros(len(now.labels), bool)
    there[new] = True
    return there


def describe_changes(was: Listed, now: Listed, left_out: Collection[str] = ()) -> str:
    """The differences between two lists that are not the same, in one line with examples.

    Args:
        left_out: Files that could not be packed, so that ``was`` lacks them.
    """
    old, new = _in_both(was, now)
    added = np.setdiff1d(np.arange(len(now.labels)), new)
    added = np.array([i for i in added.tolist() if now.name(i) not in left_out], np.int64)
    removed = np.setdiff1d(np.arange(len(was.labels)), old)
    changes = [*_line("added", added, now.name), *_line("removed", removed, was.name)]
    changes += _changed(was, now, old, new)
    if was.classes != now.classes:
        gone = [f"no {name}" for name in sorted({*was.classes} - {*now.classes})]
        come = [f"new {name}" for name in sorted({*now.classes} - {*was.classes})]
        differ = ", ".join([*gone[:2], *come[:2]]) or "the same with other numbers"
        changes.append(f"{len(was.classes)} classes, now {len(now.classes)}: {differ}")
    return "; ".join(changes) or "the order of its rows, or images that were left out"


def _in_both(was: Listed, now: Listed) -> tuple[Places, Places]:
    """Places in ``was`` and in ``now`` of the images that both have, as ``now`` lists them."""
    # 8 bytes a name, where a dict of all names would take some 200
    keys = [
        np.fromiter((hash(listed.name(i)) for i in range(len(listed.labels))), np.int64)
        for listed in (was, now)
    ]
    _, old, new = np.intersect1d(keys[0], keys[1], return_indices=True)
    # two names may have one hash
    same = [was.name(i) == now.name(j) for i, j in zip(old, new, strict=True)]
    old, new = old[same], new[same]
    order = np.argsort(new)
    return old[order], new[order]


def _changed(was: Listed, now: Listed, old: Places, new: Places) -> list[str]:
    before = np.array([*was.classes, ""], object)[was.labels[old]]
    after = np.array([*now.classes, ""], object)[now.labels[new]]

    def moved(k: int) -> str:
        return f"{now.name(new[k])}: {before[k]!r}, now {after[k]!r}"

    other_file = new[was.stamps[old] != now.stamps[new]]
    return [
        *_line("in another class", np.flatnonzero(before != after), moved),
        *_line("with another length or time", other_file, now.name),
    ]


def _line(what: str, places: Places, show: Callable[[int], str]) -> list[str]:
    num = len(places)
    if not num:
        return []
    more = [f"and {num - 2} more"] if num > 2 else []
    examples = ", ".join([*map(show, places[:2].tolist()), *more])
    return [f"{num} image{'s' * (num > 1)} {what} ({examples})"]
