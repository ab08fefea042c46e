"""What is different in a source that was packed, or half packed, before."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_ring.errors import ConfigurationError

Places = npt.NDArray[Any]


class Listed(Protocol):
    """Files with the numbers of their classes and their stamps: `Sources`, or a `ShardIndex`."""

    @property
    def classes(self) -> list[str]: ...
    @property
    def labels(self) -> npt.NDArray[np.int32]: ...
    @property
    def stamps(self) -> npt.NDArray[np.uint64]: ...
    def name(self, i: int, /) -> str: ...


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
    added = np.setdiff1d(np.arange(len(now.labels)), new).tolist()
    removed = np.setdiff1d(np.arange(len(was.labels)), old).tolist()
    changes = [
        *_line("added", [i for i in added if now.name(i) not in left_out], now.name),
        *_line("removed", removed, was.name),
        *_changed(was, now, old, new),
    ]
    if was.classes != now.classes:
        changes.append(f"{len(was.classes)} classes, now {len(now.classes)}")
    return "; ".join(changes) or "the order of its rows, or images that were left out"


def _in_both(was: Listed, now: Listed) -> tuple[Places, Places]:
    """Places in ``was`` and in ``now`` of the images that both have, as ``now`` lists them."""
    # 8 bytes a name, where a dict of all names would take some 200
    before, after = (
        np.fromiter((hash(listed.name(i)) for i in range(len(listed.labels))), np.int64)
        for listed in (was, now)
    )
    _, old, new = np.intersect1d(before, after, return_indices=True)
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

    other_file = new[was.stamps[old] != now.stamps[new]].tolist()
    return [
        *_line("in another class", np.flatnonzero(before != after).tolist(), moved),
        *_line("with another length or time", other_file, now.name),
    ]


def _line(what: str, places: list[int], show: Callable[[int], str]) -> list[str]:
    num = len(places)
    more = [f"and {num - 2} more"] * (num > 2)
    examples = ", ".join([*map(show, places[:2]), *more])
    return [f"{num} image{'s' * (num > 1)} {what} ({examples})"] * (num > 0)
