"""A folder with a folder for each class, read as torchvision's ImageFolder reads it: same classes, files and order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from lightning_ring.data.packing.listing import Found, LeftOut

# ImageFolder's own.
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def scan_folder(folder: Path) -> Iterator[Found | LeftOut]:
    """Every image below a class folder, and everything else by name. Names are relative to ``folder``.

    Raises:
        OSError: A folder cannot be read.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.is_dir():
            yield LeftOut(entry.name, "not in a class folder")
        elif entry.name.startswith("."):
            yield LeftOut(entry.name, "a hidden folder is no class")
        else:
            yield Found(None, entry.name)
            yield from _scan_class(folder, entry.name)


def _scan_class(folder: Path, class_name: str) -> Iterator[Found | LeftOut]:
    loops: list[LeftOut] = []
    # sorted() as ImageFolder has it, which is not the order of a walk through sorted folders ("a-b" before "a/c").
    for root, files in sorted(_walk(str(folder), class_name, loops)):
        for file in sorted(files):
            name = os.path.relpath(os.path.join(root, file), folder)
            if file.lower().endswith(EXTENSIONS):
                yield Found(name, class_name)
            else:
                yield LeftOut(name, f"its extension is none of {' '.join(EXTENSIONS)}; a CSV can list it all the same")
    yield from loops


def _walk(folder: str, class_name: str, loops: list[LeftOut]) -> Iterator[tuple[str, list[str]]]:
    def fail(error: OSError) -> None:
        raise error  # os.walk would leave a folder that it cannot read out without a word

    for root, folders, files in os.walk(os.path.join(folder, class_name), onerror=fail, followlinks=True):
        here = os.path.realpath(root) + os.sep
        for name in list(folders):
            path = os.path.join(root, name)
            if os.path.islink(path) and here.startswith(os.path.realpath(path) + os.sep):
                folders.remove(name)
                loops.append(LeftOut(os.path.relpath(path, folder), "a link to a folder that it is in"))
        yield root, files
