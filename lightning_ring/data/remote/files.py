"""Bytes of shards that lie elsewhere: from the cache, and from the object store into it."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress

from lightning_ring.data.remote.cache import Cache
from lightning_ring.data.remote.cached_shard import BLOCK, CachedShard
from lightning_ring.data.remote.mirror import Mirror
from lightning_ring.data.remote.store import ObjectStore
from lightning_ring.data.shards.index import ByteRange
from lightning_ring.data.shards.manifest import Shard
from lightning_ring.errors import StoreError
from lightning_ring.host.open_files import most_open_files

_UNIT = 64 * BLOCK  # 256 KiB, fetched at once where the whole set fits into the cache: each byte comes once anyway
_LONGEST = 1 << 22  # bytes of a request, when neighbours are wanted
_POLL = 0.01  # seconds between looks at blocks that another process fetches
_EVICTED = 20  # times that bytes may be removed before they are read

_Unit = tuple[int, int]  # shard; number of the unit in it


class RemoteFiles:
    """Reads bytes of shards below a URL, as `ShardFiles` does below a folder. Safe to use from several threads.

    What is wanted is fetched in units of blocks, neighbours in one request, in the order in which it was asked for. A
    unit that is under way is not asked for again, neither by this process nor by others.
    """

    more_reads = 2  # where bytes are not those that were packed

    def __init__(self, store: ObjectStore, cache: Cache, shards: Sequence[Shard], mirror: Mirror) -> None:
        self._mirror = mirror  # the index stays in the cache as long as its shards are read
        self._store = store
        self._cache = cache
        self._shards = shards
        self._unit = _UNIT if cache.can_hold(sum(shard.bytes for shard in shards)) else BLOCK
        self._max_open = max(1, most_open_files() // 8)
        self.lookahead = store.options.lookahead
        self._start()
        _instances.add(self)

    def _start(self) -> None:
        self._open: dict[int, CachedShard] = {}  # the oldest first
        self._under_way: dict[_Unit, Future[None]] = {}
        self._lock = threading.Lock()

    # -- what the data set asks for

    def read(self, place: ByteRange) -> bytes:
        """The bytes at ``place``. Their CRC-32 is the caller's to compare.

        Raises:
            ShardLostError: The shard is not there.
            StoreError: The store did not answer until the deadline, or the cache's disk fails or is too small.
        """
        for _ in range(_EVICTED):
            file = self._file(place.shard)
            if file.has(file.blocks(place.offset, place.offset + place.size)):
                data = file.read(place.offset, place.size)
                if len(data) == place.size:
                    return data
            for future in self._fetch([place]):
                future.result()
        raise StoreError(
            f"{self.path(place.shard)} at offset {place.offset}: its bytes were removed from the cache "
            f"{self._cache.folder} {_EVICTED} times before they were read. Give it more room: Remote(cache_gb=...)."
        )

    def read_again(self, place: ByteRange) -> bytes:
        """The bytes at ``place``, from the store: those in the cache are damaged."""
        file = self._file(place.shard)
        self._write(lambda: file.drop(file.blocks(place.offset, place.offset + place.size)))
        return self.read(place)

    def will_need(self, places: Sequence[ByteRange]) -> None:
        """Start fetching ``places``, in this order; returns at once."""
        self._fetch(places)

    def path(self, shard: int) -> str:
        return f"{self._store.url}/{self._shards[shard].name}"

    # -- fetching

    def _fetch(self, places: Iterable[ByteRange]) -> list[Future[None]]:
        """Requests under way for what is not there of ``places``."""
        wanted = dict.fromkeys(unit for place in places for unit in self._units(place))
        with self._lock:
            futures = [self._under_way[unit] for unit in wanted if unit in self._under_way]
            missing = [unit for unit in wanted if unit not in self._under_way and not self._has(unit)]
            for shard, units in _neighbours(missing, max(1, _LONGEST // self._unit)):
                future = self._store.submit(self._into_cache, shard, units)
                self._under_way |= {(shard, number): future for number in units}
                futures.append(future)
        return list(dict.fromkeys(futures))

    async def _into_cache(self, shard: int, units: range) -> None:
        try:
            blocks = self._blocks(shard, units)
            while not self._file(shard).has(blocks):
                if self._file(shard).being_fetched(blocks):
                    await asyncio.sleep(_POLL)  # by another process
                elif await self._fetch_now(shard, blocks):
                    return
        finally:
            with self._lock:
                for number in units:
                    self._under_way.pop((shard, number), None)

    async def _fetch_now(self, shard: int, blocks: range) -> bool:
        """False if another process has turned to ``blocks`` while this one waited for its turn."""
        async with self._store.turn():
            file = self._file(shard)
            if file.has(blocks) or file.being_fetched(blocks):
                return False
            self._write(lambda: self._file(shard).will_fetch(blocks))
            try:
                data = await self._store.read(self._shards[shard].name, *file.bytes_of(blocks))
                self._write(lambda: self._keep(shard, blocks, data))
            except BaseException:
                with suppress(OSError):
                    file.drop(blocks)
                raise
            return True

    def _keep(self, shard: int, blocks: range, data: bytes) -> None:
        self._cache.make_room(len(data))
        self._file(shard).write(blocks, data)

    def _write(self, write: Callable[[], None]) -> None:
        """``write()``; where the disk is full, once more without the shards that the cache holds."""
        try:
            write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise self._cache.unwritable(error) from error
            self._cache.empty()
            try:
                write()
            except OSError as again:
                raise self._cache.unwritable(again) from again

    # -- units and files

    def _units(self, place: ByteRange) -> Iterator[_Unit]:
        for number in range(place.offset // self._unit, -(-(place.offset + place.size) // self._unit)):
            yield place.shard, number

    def _blocks(self, shard: int, units: range) -> range:
        end = min(units.stop * self._unit, self._shards[shard].bytes)
        return self._file(shard).blocks(units.start * self._unit, end)

    def _has(self, unit: _Unit) -> bool:
        shard, number = unit
        return self._file(shard).has(self._blocks(shard, range(number, number + 1)))

    def _file(self, shard: int) -> CachedShard:
        file = self._open.get(shard)
        if file is None or file.removed:
            for oldest in list(self._open)[: max(0, len(self._open) - self._max_open + 1)]:
                self._open.pop(oldest, None)
            path, size = self._cache.shard(self._shards[shard].sha256), self._shards[shard].bytes
            try:
                file = self._open[shard] = CachedShard(path, size)
            except OSError as error:
                raise self._cache.unwritable(error) from error
        file.touch()
        return file


_instances: weakref.WeakSet[RemoteFiles] = weakref.WeakSet()


def _start_in_child() -> None:
    """A fork has neither the threads nor the requests of its parent, and a thread may have held the lock."""
    for files in _instances:
        files._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_in_child)


def _neighbours(units: list[_Unit], most: int) -> Iterator[tuple[int, range]]:
    """Runs of at most ``most`` neighbours, in the order of the first unit of each in ``units``."""
    left = set(units)
    for shard, number in units:
        if (shard, number) in left:
            first = stop = number
            while first > 0 and (shard, first - 1) in left and stop - first < most - 1:
                first -= 1
            while (shard, stop) in left and stop - first < most:
                stop += 1
            left -= {(shard, i) for i in range(first, stop)}
            yield shard, range(first, stop)
