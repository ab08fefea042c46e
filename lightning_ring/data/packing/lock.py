"""One process packs into a folder at a time."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_ring.errors import ConfigurationError
from lightning_ring.host.file_lock import claim, release

_LOCK = "lock"

log = logging.getLogger(__name__)


@contextmanager
def only_one(state: Path, target: Path) -> Iterator[None]:
    """Lock the folder ``state`` (made if it is not there) against other processes; the lock ends
    with this process.

    An empty folder is removed at the end. Raises `ConfigurationError`: another process has it.
    """
    file = _claimed(state, target)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty; or it is gone; or another process has it by now
            if os.listdir(state) == [_LOCK]:
                os.unlink(state / _LOCK)
                os.rmdir(state)
        release(file)


def clear(state: Path, ignore_errors: bool = False) -> None:
    """Empty the locked folder ``state``, but keep its lock: another process could take the lock
    and find the rest.
    """
    for path in state.iterdir():
        with suppress(*[OSError] * ignore_errors):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()


def _claimed(state: Path, target: Path) -> int:
    path = state / _LOCK
    while True:
        state.mkdir(parents=True, exist_ok=True)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # a process that has finished removed the folder in between
        try:
            is_locked = claim(file)
            if _same(file, path):
                if not is_locked:
                    log.warning(
                        "lightning_ring: %s has no locks. See to it that one process alone packs.",
                        target,
                    )
                return file
        except BaseException as error:
            release(file)
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                found = f"another process is packing into {target}"
                raise ConfigurationError(f"{found}. Wait for it, or end it.") from None
            raise
        release(file)


def _same(file: int, path: Path) -> bool:
    """Whether ``path`` still is the open ``file``, and not one that was made after it had been
    removed.
    """
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False
