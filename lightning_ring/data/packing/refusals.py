"""What cannot be packed, and what was packed or half packed by another command or from another
source.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_ring.data.packing.changes import Listed, describe_changes, of_shards, of_sources
from lightning_ring.data.packing.job import PACKING, PackJob
from lightning_ring.data.packing.lock import clear, only_one
from lightning_ring.data.packing.sources import list_sources
from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ConfigurationError

SETTINGS = "settings.json"
"""In the folder of what is unfinished: of a packing that has begun."""


def check_paths(job: PackJob) -> None:
    source, target = job.source, job.target
    if not source.exists():
        expected = "a folder with a folder for each class, or a CSV file"
        raise ConfigurationError(f"{source} is not there. Expected {expected}.")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"{target} is inside {source}: its shards would be taken for images. Choose another."
        )


def check_empty(target: Path) -> None:
    if not target.exists() or (target / PACKING).exists():
        return
    if strangers := sorted(name for name in os.listdir(target) if name != "lost+found"):
        raise ConfigurationError(
            f"{target} is not empty: it holds {strangers[0]!r} and no packing. Choose an empty "
            "folder, or one that is not there yet."
        )


def is_left_over(state: Path, base: Manifest | None) -> bool:
    """Whether ``state`` is of a packing that has made its generation, and was ended before it
    removed the folder.
    """
    with suppress(FileNotFoundError):
        begun: int = json.loads((state / SETTINGS).read_bytes())["generation"]
        return base is not None and begun <= base.generation
    return False


def finished(job: PackJob, manifest: Manifest) -> Manifest:
    """``manifest``, if it is what ``job`` would write."""
    if manifest.generation:
        raise ConfigurationError(
            f"images were appended to {job.target} (generation {manifest.generation}). "
            "`lightning-ring pack --append` adds further images; choose another folder for "
            "another set."
        )
    refuse_other({"source": manifest.source, **manifest.settings}, job, "packed already")
    if is_left_over(job.state, manifest):
        with suppress(ConfigurationError), only_one(job.state, job.target):
            clear(job.state, ignore_errors=True)
    refuse_changed(
        manifest.identity, lambda: of_shards(job.target, manifest), job, None, "packed already"
    )
    return manifest


def refuse_changed(
    identity: str, was: Callable[[], Listed], job: PackJob, base: Manifest | None, state: str
) -> None:
    """List the source again; an error where it is not what was listed."""
    with tempfile.TemporaryDirectory(prefix="lightning-ring-") as folder:
        first = () if base is None else base.classes
        now = list_sources(job.source, Path(folder), True, job.classes, first)
        if now.identity == identity:
            return
        changes = describe_changes(was(), of_sources(now))
    what_next = (
        "To pack them as they are now, choose another folder, or remove this one."
        if base is None
        else f"To append them as they are now, remove {job.state}: it holds the append that is "
        "half finished."
    )
    raise ConfigurationError(
        f"{job.target} is {state}, and {job.source} has changed since: {changes}. Nothing was "
        f"written; {job.target} holds images and labels as they were. {what_next}"
    )


def refuse_other(was: dict[str, object], job: PackJob, state: str) -> None:
    now = job.identity
    settings = sorted(now.keys() | was.keys() - {"generation"})
    if changed := [
        f"{name} {was.get(name)}, now {now.get(name)}"
        for name in settings
        if was.get(name) != now.get(name)
    ]:
        raise ConfigurationError(
            f"{job.target} is {state} with another command: {'; '.join(changed)}. Give the same "
            "arguments, choose another folder, or remove "
            f"{job.target if not job.generation else job.state}."
        )


def disk_error(error: OSError, target: Path) -> str:
    where = error.filename or target
    kept = (
        "Finished shards are kept: run the same command again, and it goes on after the last of "
        "them."
    )
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(target).free / 2**20
        return (
            f"{where} cannot be written: {error.strerror} ({free:.0f} MiB are free). Make room. "
            f"{kept}"
        )
    return f"{where}: {error.strerror}. {kept}"
