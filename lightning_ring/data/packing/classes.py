"""Numbers of classes that are given, for ``lightning-ring pack --classes``."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_ring.data.packing.sources import check_distinct
from lightning_ring.errors import ConfigurationError


def read_classes(file: Path) -> list[str]:
    """Names of classes in the order of their numbers: a line each, or those of the
    ``manifest.json`` of other shards.

    Raises `ConfigurationError`: it cannot be read, names no class, or one twice.
    """
    try:
        text = file.read_text(encoding="utf-8")
        classes = json.loads(text)["classes"] if file.suffix == ".json" else text.split("\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--classes {file} cannot be read: {error}. Expected a text file with the name of a "
            "class in each line, or the manifest.json of packed shards."
        ) from None
    if file.suffix != ".json":
        classes = [line.rstrip("\r") for line in classes]
        while classes and not classes[-1]:
            classes.pop()
    if not classes or "" in classes:
        where = f"line {classes.index('') + 1} is empty" if classes else "it is empty"
        raise ConfigurationError(
            f"--classes {file}: {where}. Expected the name of a class in each line."
        )
    check_distinct(classes, file)
    return list(classes)
