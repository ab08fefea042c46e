"""A folder of images, a folder for each class."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from lightning_ring.data.packing.sources import EXTENSIONS, LeftOut, scan_folder
from lightning_ring.errors import ConfigurationError

log = logging.getLogger(__name__)


class ImageFolder:
    """The images below ``root/CLASS/``, in the order that torchvision's `ImageFolder` has: by
    class, then by path.

    Files of other kinds and hidden folders are reported and left out. A class without images has a
    number, as in shards and in torchvision's ``ImageFolder(allow_empty=True)``, and is reported.
    Pixels are those of the file: its EXIF orientation is not applied, as in torchvision. For
    torch's DataLoader there is torchvision's class.

    Args:
        root: The folder.

    Attributes:
        labels: Class number of every image, int32.
        classes: Names of the folders, in the order of their numbers.
        fingerprint: Equal for two folders with the same class names and file names.

    Raises:
        ConfigurationError: ``root`` is no folder, there is no image in it, or a link in it leads to
            a folder that it is in.
        OSError: A folder in it cannot be read.
    """

    def __init__(self, root: str | PathLike[str]) -> None:
        self.root = Path(root).absolute()
        if not self.root.is_dir():
            raise ConfigurationError(
                f"{self.root} is not a folder; expected one that holds a folder for each class."
            )
        self.classes: list[str] = []
        self._names: list[str] = []
        labels: list[int] = []
        others: list[str] = []
        for item in scan_folder(self.root):
            if isinstance(item, LeftOut):
                others.append(item.name)
            elif item.name is None:
                self.classes.append(item.class_name)
            else:
                labels.append(len(self.classes) - 1)
                self._names.append(item.name)
        if not labels:
            raise ConfigurationError(
                f"{self.root} holds no images; expected them in a folder for each class: "
                f"{self.root}/CLASS/name.jpg. Known extensions: {', '.join(EXTENSIONS)}."
            )
        self.labels = np.array(labels, dtype=np.int32)
        present = set(labels)
        empty = [name for number, name in enumerate(self.classes) if number not in present]
        self._report("found %d classes without images: %s", empty)
        self._report("left out %d files and folders that are not images of a class: %s", others)
        content = "\0".join([*self.classes, "", *self._names]).encode("utf-8", "surrogateescape")
        self.fingerprint = hashlib.blake2b(content, digest_size=16).hexdigest()

    def _report(self, what: str, names: list[str]) -> None:
        if names:
            shown = ", ".join(names[:5]) + ", ..." * (len(names) > 5)
            log.warning("lightning_ring: %s: " + what, self.root, len(names), shown)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, i: SupportsIndex) -> bytes:
        """Image ``i`` as it is on disk. Releases the GIL."""
        try:
            return Path(self.where(i)).read_bytes()
        except OSError as error:
            # a read that fails does not name its file
            raise OSError(error.errno, error.strerror, self.where(i)) from error

    def read_many(self, indices: Sequence[SupportsIndex]) -> list[bytes]:
        return [self.read(i) for i in indices]

    def name(self, i: SupportsIndex) -> str:
        """Its path below ``root``."""
        return self._names[i]

    def where(self, i: SupportsIndex) -> str:
        """Image ``i`` for an error message."""
        return os.path.join(self.root, self._names[i])
