"""Images of a generation that is being written: where their rows of the index come from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from lightning_ring.data.packing.files import link_or_copy
from lightning_ring.data.shards.columns import Column
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest, Shard

_AT_ONCE = 1 << 18  # rows that are in memory together


class Rows(Protocol):
    """Images in the order of their shards."""

    shards: Sequence[Shard]
    metadata: Mapping[str, Column]

    def __len__(self) -> int: ...

    def column(self, name: str) -> Iterator[npt.NDArray[Any]]:
        """``labels``, ``places`` or ``stamps``, in pieces."""

    def names(self) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
        """Names in pieces: each with a line feed behind it, and their lengths without it."""


class SetRows:
    """The images of a set, or some of them (a `Rows`).

    Args:
        kept: The numbers of these images, ascending; None: all.
        prefix: Put before every name.
        columns: ``labels`` or ``places`` of all images of the set, in the place of its own.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        kept: npt.NDArray[np.int64] | None = None,
        prefix: str = "",
        **columns: npt.NDArray[Any],
    ) -> None:
        self.root = root
        self.manifest = manifest
        self.index = ShardIndex(root, manifest)
        self.index.check_all()
        self._kept = kept
        self._columns = columns
        self.prefix = prefix
        self.shards: Sequence[Shard] = manifest.shards
        self.metadata: Mapping[str, Column] = self.index.metadata
        if kept is not None:
            ends = np.cumsum([shard.samples for shard in manifest.shards])
            counts = np.diff(np.searchsorted(kept, ends), prepend=0).tolist()
            self.shards = [
                replace(shard, samples=count, deleted=shard.deleted + shard.samples - count)
                for shard, count in zip(manifest.shards, counts, strict=True)
                if count
            ]
            self.metadata = {name: column.take(kept) for name, column in self.index.metadata.items()}

    def __len__(self) -> int:
        return len(self.index) if self._kept is None else len(self._kept)

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """Class numbers of all images of the set, also of those that are not kept."""
        return self._columns.get("labels", self.index.labels)

    def only(self, kept: npt.NDArray[np.int64]) -> SetRows:
        """The images with the numbers ``kept``, ascending."""
        assert self._kept is None
        return SetRows(self.root, self.manifest, kept, self.prefix, **self._columns)

    def give(self, name: str, folder: Path) -> bool:
        """Link the file ``name`` of the index into ``folder``; False if its content would be another one."""
        if self._kept is not None or self.prefix or name.removesuffix(".npy") in self._columns:
            return False
        link_or_copy(self.root / self.manifest.index / name, folder / name)
        return True

    def column(self, name: str) -> Iterator[npt.NDArray[Any]]:
        values = self._columns[name] if name in self._columns else self.index.column(name)
        for rows in self._pieces():
            yield values[rows]

    def names(self) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
        if not self.prefix:
            yield from self._own_names()
            return
        prefix = os.fsencode(self.prefix)
        for text, lengths in self._own_names():
            stops = np.cumsum(lengths + 1)
            starts = stops - lengths - 1
            pairs = zip(starts.tolist(), stops.tolist(), strict=True)
            yield b"".join(prefix + text[start:stop] for start, stop in pairs), lengths + len(prefix)

    def _own_names(self) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
        text, ends = self.index.names
        for rows in self._pieces():
            if isinstance(rows, slice):
                first = int(ends[rows.start - 1]) + 1 if rows.start else 0
                stops = np.asarray(ends[rows])
                yield text[first : int(stops[-1]) + 1].tobytes(), np.diff(stops, prepend=first - 1) - 1
                continue
            starts = np.where(rows > 0, ends[rows - 1] + 1, 0)
            sizes = ends[rows] - starts + 1
            places = np.arange(sizes.sum()) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
            yield text[places].tobytes(), sizes - 1

    def _pieces(self) -> Iterator[Any]:
        for start in range(0, len(self), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(self))
            yield slice(start, stop) if self._kept is None else self._kept[start:stop]
