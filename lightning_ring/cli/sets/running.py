"""How a command of sets ends: its errors, and Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from lightning_ring.data.remote.options import is_url
from lightning_ring.errors import ConfigurationError, ShardError, StoreError

EXTRAS = {
    **dict.fromkeys(("numpy", "PIL", "simplejpeg", "tqdm"), "data"),
    "pyarrow": "parquet",
    "imagehash": "duplicates",
}


def folder(text: str) -> Path:
    """An argument that names a folder: as a path, ``s3://bucket`` would be the folder ``s3:`` here."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text} is a URL, expected a folder. Change the folder, and copy it there.")
    return Path(text)


def number(text: str) -> int:
    """0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected 0 or more")
    return int(text)


def exit_code(command: str, run: Callable[[], int], after_stop: str) -> int:
    """What ``run`` returns; 1 after a `ShardError` or a `StoreError`, 130 after Ctrl-C.

    Raises `ConfigurationError`: the command line is wrong, or an extra is not installed.
    """
    try:
        return run()
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        extra = EXTRAS[error.name]
        raise ConfigurationError(
            f"{error.name} is not installed. Run `pip install 'lightning-ring[{extra}]'`."
        ) from None
    except KeyboardInterrupt:
        print(f"\nlightning-ring {command}: stopped. {after_stop}".rstrip(), file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # `| head` has seen enough
        return 0
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"lightning-ring {command}: {where}{error.strerror or error}. {after_stop}".rstrip(), file=sys.stderr)
        return 1
    except (ShardError, StoreError) as error:
        print(f"lightning-ring {command}: {error}", file=sys.stderr)
        return 1


UNCHANGED = "The set is as it was, or the change was made whole; `lightning-ring stat` says which."


def count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
