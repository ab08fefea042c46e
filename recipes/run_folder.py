"""Folders of runs: named after their overrides, and no folder for two runs."""

from __future__ import annotations

import hashlib
import itertools
import re
from pathlib import Path

MOST_CHARACTERS = 120  # of the overrides; a file system allows 255 bytes for a name


def label(overrides: str) -> str:
    """``_`` and the overrides as part of a file name; nothing where there are none.

    Characters that a shell or a file system treats specially become ``-``. Long text ends in a hash
    of all of it, so that different overrides keep different names.
    """
    name = re.sub(r"[^\w.,=+@-]+", "-", overrides, flags=re.ASCII)
    if len(name) > MOST_CHARACTERS:
        name = f"{name[:MOST_CHARACTERS]}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}"
    return f"_{name}" if name else ""


def new_folder(folder: str) -> str:
    """Make ``folder``, or where it exists ``folder_2``, ``folder_3`` and so on: runs can start
    in the same second.
    """
    for number in itertools.count(1):
        path = Path(folder if number == 1 else f"{folder}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            pass  # Hydra makes it again, and its error is reported
        return str(path)
    raise AssertionError


_PATHS = ("ckpt_path", "hydra.run.dir", "hydra.sweep.dir", "data.folder")


def quoted_path(argument: str) -> str:
    """``ckpt_path=FOLDER/seed=1,lr=2/...`` in quotes: Hydra itself refuses a further ``=``, and
    splits at a comma.
    """
    key, _, value = argument.partition("=")
    return (
        f"{key}='{value}'" if key in _PATHS and "=" in value and value[0] not in "'\"" else argument
    )
