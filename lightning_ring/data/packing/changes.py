"""What is different in a source that was packed, or half packed, before."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.sources import Sources
from lightning_ring.data.shards import REPORT, Manifest, ShardIndex
from lightning_ring.errors import ConfigurationError


@dataclass(frozen=True)
class Listed:
    """Files with the numbers of their classes and their stamps; ``left_out`` are files that
    could not be packed.
    """

    classes: list[str]
    labels: npt.NDArray[np.int32]
    stamps: npt.NDArray[np.uint64]
    name: Callable[[int], str]
    left_out: frozenset[str] = frozenset()

    def keys(self) -> npt.NDArray[np.int64]:
        """8 bytes a name, where a dict of all names would take some 200."""
        return np.fromiter(
            (hash(self.name(i)) for i in range(len(self.labels))), np.int64, len(self.labels)
        )


def of_sources(sources: Sources) -> Listed:
    labels, stamps = np.asarray(sources.labels), np.asarray(sources.stamps)
    return Listed(sources.classes, labels, stamps, lambda i: os.fsdecode(sources.listed_name(i)))


def of_set(root: Path, manifest: Manifest) -> Listed:
    index = ShardIndex(root, manifest)
    return Listed(manifest.classes, index.labels, index.column("stamps"), index.name)


def of_shards(root: Path, manifest: Manifest) -> Listed:
    index = ShardIndex(root, manifest)
    with open(root / REPORT, newline="", encoding="utf-8", errors="surrogateescape") as rows:
        left_out = frozenset(name for what, name, _ in csv.reader(rows) if what == "left out")
    return Listed(manifest.classes, index.labels, index.column("stamps"), index.name, left_out)


def already_there(was: Listed, now: Listed, target: Path) -> npt.NDArray[np.bool_]:
    """For each image of ``now`` whether ``was`` has it, by its name.

    Raises `ConfigurationError`: the name is there with another class, length or time.
    """
    _, old, new = np.intersect1d(was.keys(), now.keys(), return_indices=True)
    same_name = np.fromiter(
        (was.name(i) == now.name(j) for i, j in zip(old, new, strict=True)), bool, len(old)
    )
    old, new = old[same_name], new[same_name]  # two names may have one hash
    there = np.zeros(len(now.labels), bool)
    there[new] = True
    order = np.argsort(new)
    old, new = old[order], new[order]
    names = np.array([*was.classes, ""], object), np.array([*now.classes, ""], object)
    other_class = names[0][was.labels[old]] != names[1][now.labels[new]]
    other_file = was.stamps[old] != now.stamps[new]
    old_places = dict(zip(new[other_class].tolist(), old[other_class].tolist(), strict=True))
    changes = [
        _line("in another class", new[other_class], _moved(was, now, old_places)),
        _line("with another length or time", new[other_file], now.name),
    ]
    if found := "; ".join(change for change in changes if change):
        raise ConfigurationError(
            f"{target} has images of these names that are others: {found}. Nothing was written. "
            "Give new images other names, or pack them into another folder (`Mixture` reads "
            "several); a packed image never changes."
        )
    return there


def describe_changes(was: Listed, now: Listed) -> str:
    """The differences between two lists that are not the same, in one line with examples."""
    before, after = was.keys(), now.keys()
    _, old, new = np.intersect1d(before, after, assume_unique=True, return_indices=True)
    order = np.argsort(new)  # as they are listed now
    old, new = old[order], new[order]
    added = np.flatnonzero(~np.isin(after, before, assume_unique=True))
    added = np.array([i for i in added.tolist() if now.name(i) not in was.left_out], np.int64)
    removed = np.flatnonzero(~np.isin(before, after, assume_unique=True))
    names = np.array([*was.classes, ""], object), np.array([*now.classes, ""], object)
    other_class = names[0][was.labels[old]] != names[1][now.labels[new]]
    other_file = was.stamps[old] != now.stamps[new]
    old_places = dict(zip(new.tolist(), old.tolist(), strict=True))
    changes = [
        _line("added", added, now.name),
        _line("removed", removed, was.name),
        _line("in another class", new[other_class], _moved(was, now, old_places)),
        _line("with another length or time", new[other_file], now.name),
    ]
    if was.classes != now.classes:
        changes.append(_renumbered(was.classes, now.classes))
    found = "; ".join(change for change in changes if change)
    return found or (
        "images that were left out are others now" if was.left_out else "the order of its rows"
    )


def _moved(was: Listed, now: Listed, old: dict[int, int]) -> Callable[[int], str]:
    return lambda i: (
        f"{now.name(i)}: {was.classes[was.labels[old[i]]]!r}, now {now.classes[now.labels[i]]!r}"
    )


def _line(what: str, indices: npt.NDArray[Any], show: Callable[[int], str], most: int = 2) -> str:
    if not len(indices):
        return ""
    plural = "" if len(indices) == 1 else "s"
    return (
        f"{len(indices)} image{plural} {what} "
        f"({_some(map(show, indices[:most].tolist()), len(indices) - most)})"
    )


def _renumbered(was: list[str], now: list[str]) -> str:
    gone, come = sorted(set(was) - set(now)), sorted(set(now) - set(was))
    parts = [
        f"{what} {_some(names[:2], len(names) - 2)}"
        for what, names in (("no", gone), ("new", come))
        if names
    ]
    return f"{len(was)} classes, now {len(now)}: " + (
        ", ".join(parts) or "the same with other numbers"
    )


def _some(shown: Iterable[str], more: int) -> str:
    return ", ".join(shown) + (f", and {more} more" if more > 0 else "")
