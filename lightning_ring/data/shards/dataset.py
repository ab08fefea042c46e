"""Packed shards as a map-style data set."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.shards.index import ByteRange, ShardIndex, key
from lightning_ring.data.shards.manifest import Shard, check_lengths, read_manifest
from lightning_ring.errors import ShardError


class _OpenFile:
    """A descriptor that closes when the last thread that uses it lets go."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        if hasattr(os, "posix_fadvise"):  # Linux; without it each small read would fetch 128 KiB
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class ShardFiles:
    """Reads bytes of shards. Files open when they are first needed and share no position, so threads need no lock.

    ``max_open`` files are kept open, by default a quarter of the process's limit.
    """

    def __init__(self, root: Path, shards: Sequence[Shard], max_open: int | None = None) -> None:
        self._root = root
        self._shards = shards
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        few = limit // 4 if limit != resource.RLIM_INFINITY else len(shards)
        self._max_open = max(1, few if max_open is None else max_open)
        self._files: dict[int, _OpenFile] = {}

    def _file(self, shard: int) -> _OpenFile:
        file = self._files.get(shard)
        if file is None:
            try:
                file = _OpenFile(self.path(shard))
            except FileNotFoundError:
                raise ShardError(f"{self.path(shard)} is gone since it was opened.") from None
            # Not an OrderedDict behind a lock: a lock that a thread holds during a fork stays held in the child.
            for oldest in list(self._files)[: max(0, len(self._files) - self._max_open + 1)]:
                self._files.pop(oldest, None)
            self._files[shard] = file
        return file

    def read(self, place: ByteRange) -> bytes:
        """The bytes at ``place``, in one system call, without the GIL.

        Raises `ShardError`: the file is gone, ends before, or the disk fails.
        """
        file = self._file(place.shard)  # held, or another thread could close it meanwhile
        try:
            data = os.pread(file.descriptor, place.size, place.offset)
        except OSError as error:
            raise ShardError(
                f"{self.path(place.shard)} cannot be read at offset {place.offset}, {place.size} bytes: "
                f"{error.strerror}. Look after the disk or the network file system, then start the job again."
            ) from error
        if len(data) != place.size:
            shard = self._shards[place.shard]
            raise ShardError(
                f"{self.path(place.shard)} is cut short: at offset {place.offset} it has {len(data)} bytes, expected "
                f"{place.size}. Restore the file ({shard.bytes} bytes, SHA-256 {shard.sha256})."
            )
        return data

    def will_need(self, places: Sequence[ByteRange]) -> None:
        """Tell the kernel to start reading ``places``, all at once; returns before it has."""
        if hasattr(os, "posix_fadvise"):
            for shard, offset, size in places:
                file = self._file(shard)
                os.posix_fadvise(file.descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].name


class ShardDataset(Dataset[tuple[Any, int]]):
    """The images that ``lightning-ring pack`` wrote to ``root``: ``dataset[i]`` is an image and its label.

    Any image is found in constant time. The index is mapped, so the processes of a host share it; shards are opened in
    the process that first reads them. Safe to read from several threads, to fork and to pickle (as its path).

    Args:
        root: The folder.
        transform: Called with the uint8 tensor (3 x height x width, RGB) of each image.
        decode: False gives the encoded bytes instead of a tensor, to ``transform`` too.

    Attributes:
        labels: Class number of every image: int32, length ``len(dataset)``, mapped read-only. You may set another
            array; it travels with the data set to workers.
        classes: Names of the classes, in the order of their numbers.
        fingerprint: Equal for two data sets that hold the same images, labels, names and order.

    Raises:
        ShardError: ``root`` holds no finished packing, or a file is missing or not as long as it was written.
    """

    labels: npt.NDArray[np.int32]
    classes: list[str]
    fingerprint: str

    def __init__(
        self, root: str | PathLike[str], transform: Callable[[Any], Any] | None = None, *, decode: bool = True
    ) -> None:
        self.root = Path(root).absolute()
        self.transform = transform
        self.decode = decode
        self._open()

    def _open(self) -> None:
        manifest = read_manifest(self.root)
        if problems := check_lengths(self.root, manifest.shards):
            raise ShardError("\n".join([*problems, "Restore what is missing or damaged, or pack the images again."]))
        self._index = ShardIndex(self.root, manifest)
        self._files = ShardFiles(self.root, manifest.shards)
        self.labels = self._index.labels
        self.classes = manifest.classes
        self.fingerprint = manifest.fingerprint

    def __getstate__(self) -> dict[str, Any]:
        # Neither a copy of the index nor descriptors of this process travel to a spawned worker.
        state = {name: value for name, value in self.__dict__.items() if name not in ("_index", "_files")}
        if self.labels is self._index.labels:
            del state["labels"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()
        if self.fingerprint != state["fingerprint"]:
            raise ShardError(f"{self.root} was packed anew since this data set was opened. Start the job again.")
        self.__dict__.update(state)  # labels and classes that the user has changed

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: SupportsIndex) -> tuple[Any, int]:
        place = self._index.place(i)
        return self._sample(i, place, self._files.read(place))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[tuple[Any, int]]:
        """One sample for each of ``indices``; torch's DataLoader asks for a batch this way."""
        places = [self._index.place(i) for i in indices]
        return [self._sample(*sample) for sample in zip(indices, places, self._read(places), strict=True)]

    def read(self, i: SupportsIndex) -> bytes:
        """Image ``i`` as it lies in its shard: a JPEG, or a PNG or WebP that was small already. Releases the GIL."""
        return self._files.read(self._index.place(i))

    def read_many(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        """`read` for each of ``indices``: the disk is asked for all of them before the first is waited for."""
        return self._read([self._index.place(i) for i in indices])

    def key(self, i: SupportsIndex) -> str:
        """The name of image ``i`` in its tar, and in webdataset (``__key__``)."""
        return key(self._index.position(i))

    def name(self, i: SupportsIndex) -> str:
        """Where image ``i`` came from: its path in the image folder or in the CSV."""
        return self._index.name(i)

    def where(self, i: SupportsIndex) -> str:
        """Image ``i`` for an error message: its file, offset and name."""
        place = self._index.place(i)
        path = self._files.path(place.shard)
        return f"image {self._index.position(i)} ({self.name(i)}), {path} at offset {place.offset}, {place.size} bytes"

    def _read(self, places: Sequence[ByteRange]) -> list[bytes]:
        self._files.will_need(places)
        return [self._files.read(place) for place in places]

    def _sample(self, i: SupportsIndex, place: ByteRange, data: bytes) -> tuple[Any, int]:
        image: Any = data
        if self.decode:
            try:
                image = torch.from_numpy(decode_rgb(data)).permute(2, 0, 1)
            except (ValueError, OSError) as error:
                raise ShardError(
                    f"{self.where(i)}, cannot be decoded: {error}. `lightning-ring pack --verify {self.root}` finds "
                    "everything that is damaged."
                ) from error
        return image if self.transform is None else self.transform(image), int(self.labels[i])
