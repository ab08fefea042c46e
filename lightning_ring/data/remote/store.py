"""Ranges of objects below a URL, read with repeated tries until a deadline."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from lightning_ring.data.remote.cached_shard import write_at
from lightning_ring.data.remote.options import Remote
from lightning_ring.errors import ConfigurationError, ShardLostError, StoreError

T = TypeVar("T")
_PART = 1 << 22  # bytes of one request for a long object
_SLOWEST = 1 << 20  # bytes a second of a link that is still waited for
_TRY_AGAIN = (408, 425, 429)
_jitter = random.Random()  # not the user's generator, nor seeded alike on all ranks


@dataclass(slots=True)
class _Connection:
    process: int
    fs: Any
    loop: asyncio.AbstractEventLoop
    slots: asyncio.Semaphore


class ObjectStore:
    """The objects below ``url``. Coroutines run in fsspec's thread (`submit`); none of them blocks for ever.

    Nothing is opened before the first request. A forked process opens connections of its own.
    """

    def __init__(self, url: str, options: Remote) -> None:
        if not hasattr(os, "pread"):
            raise ConfigurationError(f"{url} was given, but on Windows only shards in a folder can be read.")
        if "?" in url or "#" in url:
            raise ConfigurationError(
                f"{url.split('?')[0]}?... was given, expected a URL that names of objects can be appended to. Put a "
                "token into Remote(storage_options={'headers': ...})."
            )
        self.url = url.rstrip("/")
        self.options = options
        self._connection: _Connection | None = None
        self._failure: StoreError | None = None

    def submit(self, work: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> Future[T]:
        """Have ``work(*arguments)`` run in the thread of the connections."""
        loop = self._connected().loop
        return asyncio.run_coroutine_threadsafe(work(*arguments), loop)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits until fewer than ``num_requests`` are under way.

        Raises:
            StoreError: An earlier request has failed meanwhile: a thousand that wait shall not each have a deadline.
        """
        connection, failure = self._connected(), self._failure
        async with connection.slots:
            if self._failure is not None and self._failure is not failure:
                raise StoreError(str(self._failure)) from self._failure
            yield

    async def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` to ``stop`` of object ``name``, all of them.

        Raises:
            ShardLostError: There is no such object.
            StoreError: The store refuses, or did not give the bytes until the deadline.
        """
        what = f"{self._path(name)}, bytes {start} to {stop - 1},"
        return await self._repeated(what, stop - start, partial(self._range, name, start, stop))

    async def read_whole(self, name: str) -> bytes:
        """Object ``name``, whose length is not known."""
        fs = self._connected().fs
        return await self._repeated(self._path(name), _PART, partial(fs._cat_file, self._path(name)))

    async def size(self, name: str) -> int | None:
        """The length of object ``name``; `None` if the server does not say."""
        fs, path = self._connected().fs, self._path(name)
        async with self.turn():
            info = await self._repeated(path, 0, partial(fs._info, path))
        return info.get("size")

    async def download(self, name: str, path: Path, make_room: Callable[[int], None]) -> None:
        """Write object ``name`` to the file ``path``, in parts; ``make_room`` is told the bytes of each before."""
        size = await self.size(name)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)

        async def part(start: int, stop: int) -> None:
            async with self.turn():
                data = await self.read(name, start, stop)
            make_room(len(data))
            write_at(file, data, start)

        try:
            if size is None:
                data = await self.read_whole(name)
                make_room(len(data))
                write_at(file, data, 0)
                size = 0  # of what is left
            step = _PART * self.options.num_requests
            for first in range(0, size, step):
                stop = min(first + step, size)
                parts = [part(start, min(start + _PART, stop)) for start in range(first, stop, _PART)]
                ends = await asyncio.gather(*parts, return_exceptions=True)  # or some would write after the file closes
                for error in filter(None, ends):
                    raise error
            await asyncio.to_thread(os.fsync, file)
        finally:
            os.close(file)

    # -- one request

    async def _range(self, name: str, start: int, stop: int) -> bytes:
        data: bytes = await self._connected().fs._cat_file(self._path(name), start=start, end=stop)
        if len(data) > stop - start:
            raise StoreError(
                f"{self._path(name)}: {len(data)} bytes came when {stop - start} were asked for. The server does not "
                "answer requests for ranges, which reading single images needs (nginx and object stores do)."
            )
        if len(data) < stop - start:
            raise EOFError(f"{len(data)} of {stop - start} bytes came")
        return data

    async def _repeated(self, what: str, num_bytes: int, attempt: Callable[[], Awaitable[T]]) -> T:
        """``attempt()``, again and again until the deadline.

        A connection may stall: the first try has two seconds, and the time of ``num_bytes`` on a slow link. A store may
        be slow: each further try has twice as long.
        """
        deadline, began, tries = self.options.deadline, monotonic(), 0
        told: Exception | None = None  # what went wrong, where a try did not just take too long
        while True:
            one_try = 2.0 * 2**tries + num_bytes / _SLOWEST
            tries += 1
            try:
                return await asyncio.wait_for(attempt(), min(one_try, deadline - (monotonic() - began)))
            except Exception as raised:
                error = _cause(raised)
                if isinstance(error, FileNotFoundError):
                    raise ShardLostError(
                        f"{what} cannot be read: it is not there. Upload it again; or open the newest "
                        "generation, if this one was removed."
                    ) from error
                if isinstance(error, StoreError):
                    raise
                if (reason := _permanent(error)) is not None:
                    raise StoreError(f"{what} cannot be read: {reason} ({_short(error)}).") from error
                if told is None or not isinstance(error, asyncio.TimeoutError):
                    told = error
                pause = min(5.0, 0.05 * 2**tries) * _jitter.uniform(0.5, 1.0)
                if monotonic() - began + pause >= deadline:
                    self._failure = StoreError(
                        f"{what} could not be read in {deadline:g} s, with {tries} tries: {_short(told)}. Look after "
                        "the store and the network, then start the job again. Remote(deadline=...) waits longer."
                    )
                    raise self._failure from error
            await asyncio.sleep(pause)

    # -- the connection

    def _path(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _connected(self) -> _Connection:
        if self._connection is None or self._connection.process != os.getpid():
            fs = _file_system(self.url, self.options)
            slots = asyncio.Semaphore(self.options.num_requests)
            self._connection = _Connection(os.getpid(), fs, fs.loop, slots)
        return self._connection


def _file_system(url: str, options: Remote) -> Any:
    """fsspec's asynchronous file system for ``url``."""
    try:
        import fsspec
        from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper

        protocol = fsspec.utils.get_protocol(url)
        settings = dict(options.storage_options)
        if protocol in ("s3", "s3a"):  # by default no more than ten requests are under way
            ours = {"max_pool_connections": options.num_requests, "retries": {"total_max_attempts": 1}}
            settings["config_kwargs"] = ours | dict(settings.get("config_kwargs", {}))
        fs = fsspec.filesystem(protocol, skip_instance_cache=True, **settings)
        if hasattr(fs, "retries"):  # s3fs, gcsfs: tries of its own would hide the errors until the deadline
            fs.retries = 1
    except (ImportError, ValueError) as error:
        raise ConfigurationError(
            f"{url} cannot be opened: {error}. `pip install 'lightning-ring[remote]'` installs what s3:// and https:// "
            "need, and lightning-ring[gcs] what gs:// needs; another protocol needs its own package for fsspec."
        ) from error
    return fs if fs.async_impl else AsyncFileSystemWrapper(fs, asynchronous=False)


def _cause(error: Exception) -> Exception:
    """fsspec's HTTP calls everything a missing file when it asks for a length; the error behind that otherwise."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and type(cause).__module__.startswith("aiohttp"):
        assert isinstance(cause, Exception)
        return error if getattr(cause, "status", None) in (404, 410) else cause
    return error


def _permanent(error: Exception) -> str | None:
    """Why another try cannot help; `None` if it may."""
    status = getattr(error, "status", None) or getattr(error, "code", None)
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in type(error).__name__:
        return "access is denied. Look after the credentials and Remote(storage_options=...)"
    if isinstance(status, int) and 400 <= status < 500 and status not in _TRY_AGAIN:
        return "the server refuses it"
    return None


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300].rstrip(": ")
