"""What cannot be packed, and what was packed or half packed by another command or from another source."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from lightning_ring.data.packing.changes import Listed, describe_changes, of_shards, of_sources
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.sources import list_sources
from lightning_ring.data.sets.lock import PACKING, changing
from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ConfigurationError


def check_paths(job: PackJob) -> None:
    source, target = job.source, job.target
    if not source.exists():
        expected = "a folder with a folder for each class, or a CSV file"
        raise ConfigurationError(f"{source} is not there. Expected {expected}.")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(f"{target} is inside {source}: its shards would be taken for images. Choose another.")


def check_empty(target: Path) -> None:
    if not target.exists() or (target / PACKING).exists():
        return
    if strangers := sorted(name for name in os.listdir(target) if name != "lost+found"):
        raise ConfigurationError(
            f"{target} is not empty: it holds {strangers[0]!r} and no packing. Choose an empty folder, or one that is "
            "not there yet."
        )


def finished(job: PackJob, manifest: Manifest) -> Manifest:
    """``manifest``, if it is what ``job`` would write."""
    if manifest.generation:
        raise ConfigurationError(
            f"{job.target} is a set of generation {manifest.generation} ({manifest.change}). `lightning-ring pack "
            "--append` adds images to it; choose another folder for another set."
        )
    refuse_other({"source": manifest.source, **manifest.settings}, job, "packed already")
    if (job.target / PACKING).exists():
        with suppress(ConfigurationError), changing(job.target):
            pass  # it clears what is left where the manifest was written, and then something ended the process
    refuse_changed(manifest.identity, lambda: of_shards(job.target, manifest), job, None, "packed already")
    return manifest


def refuse_changed(identity: str, was: Callable[[], Listed], job: PackJob, base: Manifest | None, state: str) -> None:
    """List the source again; an error where it is not what was listed."""
    with tempfile.TemporaryDirectory(prefix="lightning-ring-") as folder:
        first = () if base is None else base.classes
        now = list_sources(job.source, Path(folder), True, job.classes, first, job.prefix)
        if now.identity == identity:
            return
        changes = describe_changes(was(), of_sources(now))
    what_next = (
        "To pack them as they are now, choose another folder, or remove this one."
        if base is None
        else "To append them as they are now, give up those that are half packed: `lightning-ring prune --unfinished "
        f"{job.target}`."
    )
    raise ConfigurationError(
        f"{job.target} is {state}, and {job.source} has changed since: {changes}. Nothing was written; {job.target} "
        f"holds images and labels as they were. {what_next}"
    )


def refuse_other(was: dict[str, object], job: PackJob, state: str) -> None:
    now = job.identity
    settings = sorted(now.keys() | was.keys() - {"generation"})
    if changed := [
        f"{name} {was.get(name)}, now {now.get(name)}" for name in settings if was.get(name) != now.get(name)
    ]:
        raise ConfigurationError(
            f"{job.target} is {state} with another command: {'; '.join(changed)}. Give the same arguments, choose "
            "another folder, or remove this one."
        )


def disk_error(error: OSError, target: Path) -> str:
    where = error.filename or target
    kept = "Finished shards are kept: run the same command again, and it goes on after the last of them."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(target).free / 2**20
        return f"{where} cannot be written: {error.strerror} ({free:.0f} MiB are free). Make room. {kept}"
    return f"{where}: {error.strerror}. {kept}"
