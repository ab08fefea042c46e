"""Sources become prepared images, on several threads and in order."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from lightning_ring.data.packing.image import PackedImage, UnusableImageError, prepare_image
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.sources import Sources
from lightning_ring.errors import ShardError


def prepared_images(
    sources: Sources, start: int, settings: PackSettings, pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[int, PackedImage | str]]:
    """From source number ``start`` on: its number, and the image or the reason why it is left out.

    Decoding, resizing and encoding release the GIL. At most ``ahead`` images wait in memory.

    Raises:
        ShardError: A source is there but cannot be read (a failing disk, a network file system that is gone).
    """
    waiting: deque[tuple[int, Future[PackedImage | str]]] = deque()
    for position in range(start, len(sources)):
        waiting.append((position, pool.submit(_prepare, sources, position, settings)))
        if len(waiting) >= ahead:
            position, future = waiting.popleft()
            yield position, future.result()
    for position, future in waiting:
        yield position, future.result()


def _prepare(sources: Sources, position: int, settings: PackSettings) -> PackedImage | str:
    path = sources.path(position)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe would wait for ever
            return "cannot be read: not a regular file"
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        if not sources.folder.exists():  # or every image would be left out, one by one
            raise ShardError(f"{sources.folder} is gone. Bring it back and run the same command again.") from error
        return f"cannot be read: {error.strerror}"
    except ValueError as error:  # a zero byte in the path
        return f"cannot be read: {error}"
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENAMETOOLONG):  # the name is at fault, not the disk
            return f"cannot be read: {error.strerror}"
        raise ShardError(f"{path} cannot be read: {error.strerror}. Then run the same command again.") from error
    try:
        return prepare_image(data, settings.size, settings.quality)
    except UnusableImageError as error:
        return str(error)
