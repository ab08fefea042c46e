"""One process changes a set at a time."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_ring.data.shards.manifest import Manifest, read_manifest
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.file_lock import claim, release

PACKING = ".packing"
_LOCK = "lock"
SETTINGS = "settings.json"  # in it: of a packing that has begun
_PAUSE = 0.1  # seconds between two looks
_PATIENCE = 30.0  # seconds

log = logging.getLogger(__name__)


@contextmanager
def only_one(state: Path, target: Path, wait: bool = False) -> Iterator[None]:
    """Lock the folder ``state`` (made if it is not there) against other processes; the lock ends with this process.

    An empty folder is removed at the end. Raises `ConfigurationError`: another process has it, and ``wait`` is False.
    """
    file = _claimed(state, target, wait)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty; or it is gone; or another process has it by now
            if os.listdir(state) == [_LOCK]:
                os.unlink(state / _LOCK)
                os.rmdir(state)
        release(file)


def clear(state: Path, ignore_errors: bool = False) -> None:
    """Empty the locked folder ``state``, but keep its lock: another process could take the lock and find the rest."""
    for path in state.iterdir():
        with suppress(*[OSError] * ignore_errors):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()


def _claimed(state: Path, target: Path, wait: bool) -> int:
    path = state / _LOCK
    began, said = time.monotonic(), False
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
                    log.warning("lightning_ring: %s has no locks. See to it that one process alone changes it.", target)
                return file
        except OSError as error:
            release(file)
            if error.errno != errno.EBUSY:
                raise
            if not wait:
                found = f"another process is packing into {target}, or changes it"
                raise ConfigurationError(f"{found}. Wait for it, or end it.") from None
            if not said and time.monotonic() - began > _PATIENCE:
                log.warning("lightning_ring: waiting for another process that packs into %s.", target)
                said = True
            time.sleep(_PAUSE)
            continue
        except BaseException:
            release(file)
            raise
        release(file)


def _same(file: int, path: Path) -> bool:
    """Whether ``path`` still is the open ``file``, and not one that was made after it had been removed."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def changing(target: Path) -> Iterator[Manifest]:
    """The newest generation of ``target``, which no other process changes meanwhile.

    Raises:
        ShardError: ``target`` is no set.
        ConfigurationError: Another process changes it, or images were being appended and that has not finished.
    """
    read_manifest(target)  # before anything is made in a folder that is no set
    state = target / PACKING
    with only_one(state, target):
        manifest = read_manifest(target)
        if is_unfinished(target, manifest):
            raise ConfigurationError(
                f"{target} has a half finished `pack --append`. Start the same command again, it goes on; or give it "
                f"up with `lightning-ring prune --unfinished {target}`."
            )
        try:
            yield manifest
        finally:
            clear(state, ignore_errors=True)


def is_unfinished(target: Path, newest: Manifest | None) -> bool:
    """Whether a packing into ``target`` has begun, and has not made its generation."""
    state = target / PACKING
    made = -1 if newest is None else newest.generation
    for path in (state / SETTINGS, *state.glob(f"part-*/{SETTINGS}")):
        with suppress(FileNotFoundError):  # or it has just made it
            if json.loads(path.read_bytes())["generation"] > made:
                return True
    return False
