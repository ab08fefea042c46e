"""A lock on an open file. The kernel releases it when the process that holds it ends. Windows
has none of this kind.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from lightning_ring.host import fcntl

TAKEN = "another job is writing it now"
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # network file systems without locks
_held: set[int] = set()


def claim(file: int) -> bool:
    """Lock the open ``file`` against other processes, until `release`; OSError (``errno.EBUSY``) if
    one holds it.

    False where there are no locks: on Windows, and on some network file systems.
    """
    locked = _lock(file)
    if locked is False:
        raise OSError(errno.EBUSY, TAKEN)
    _held.add(file)
    return locked is True


def release(file: int) -> None:
    """Close ``file``, claimed or not."""
    _held.discard(file)
    os.close(file)


def is_claimed(path: Path) -> bool:
    """Whether ``path`` is being written now."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _lock(file) is False
    finally:
        os.close(file)


def _lock(file: int) -> bool | None:
    """None: there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _leave_to_parent() -> None:
    """A lock lives as long as some process has the file open: a data loader's worker may outlive
    its rank.
    """
    for file in _held:
        with suppress(OSError):
            os.close(file)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)
