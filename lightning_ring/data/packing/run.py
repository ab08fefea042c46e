"""A packing from beginning to end: list the sources, write shard after shard, write the index, then
the manifest.

While it runs, ``DST/.packing`` holds the list, a record of each finished shard, and the shard being
written. A shard gets its name when it is whole and on the disk. Started again after whatever ended
it, packing goes on after the last finished shard, and ends with the bytes that it would have
written uninterrupted. If the source has changed meanwhile, nothing is written: the error says what
has changed.

An append works in the same way: it writes shards with the next numbers, and a manifest that names
old and new ones.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from PIL import Image

from lightning_ring.data.packing.changes import (
    Listed,
    already_there,
    describe_changes,
    of_set,
    of_shards,
    of_sources,
)
from lightning_ring.data.packing.image import prepared_images
from lightning_ring.data.packing.job import PACKING, PackJob, PackSettings
from lightning_ring.data.packing.sources import (
    HEADER,
    Sources,
    leave_out_there,
    list_sources,
    load_sources,
    write_whole,
)
from lightning_ring.data.packing.writer import (
    COUNTED,
    Progress,
    Rest,
    ShardRecord,
    read_records,
    write_generation,
    write_shards,
)
from lightning_ring.data.shards import MANIFEST, Manifest, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.host.file_lock import claim, release

_LOCK = "lock"

log = logging.getLogger(__name__)


@contextmanager
def only_one(state: Path, target: Path) -> Iterator[None]:
    """Lock the folder ``state`` (made if it is not there) against other processes; the lock ends
    with this process.

    An empty folder is removed at the end. Raises `ConfigurationError`: another process has it.
    """
    file = _claimed(state, target)
    try:
        yield
    finally:
        with suppress(OSError):  # it is not empty; or it is gone; or another process has it by now
            if os.listdir(state) == [_LOCK]:
                os.unlink(state / _LOCK)
                os.rmdir(state)
        release(file)


def clear(state: Path, ignore_errors: bool = False) -> None:
    """Empty the locked folder ``state``, but keep its lock: another process could take the lock
    and find the rest.
    """
    for path in state.iterdir():
        with suppress(*[OSError] * ignore_errors):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK:
                path.unlink()


def _claimed(state: Path, target: Path) -> int:
    path = state / _LOCK
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
                    log.warning(
                        "lightning_ring: %s has no locks. See to it that one process alone packs.",
                        target,
                    )
                return file
        except BaseException as error:
            release(file)
            if isinstance(error, OSError) and error.errno == errno.EBUSY:
                found = f"another process is packing into {target}"
                raise ConfigurationError(f"{found}. Wait for it, or end it.") from None
            raise
        release(file)


def _same(file: int, path: Path) -> bool:
    """Whether ``path`` still is the open ``file``, and not one that was made after it had been
    removed.
    """
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


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


# the report of an append that added nothing, and so made no generation
NOT_ADDED = "index/left-out.csv"


def pack(
    source: Path,
    target: Path,
    settings: PackSettings,
    workers: int,
    progress: Progress,
    classes: Sequence[str] | None = None,
    append: bool = False,
) -> Manifest:
    """Pack the images of ``source`` into ``target``, on ``workers`` threads; nothing if they are
    packed.

    A manifest's ``counts`` are those of this packing, also where nothing was added.

    Args:
        classes: Names of classes in the order of their numbers; None: by name, after those that the
            set has.
        append: Add to the set in ``target``, if there is one.

    Raises:
        ConfigurationError: The source cannot be packed, has changed since it was, or the target
            holds something else.
        ShardError: The disk is full or failing. What is finished is kept; the same call goes on
            from there.
    """
    job = PackJob(source.absolute(), target.absolute(), settings, classes, append)
    check_paths(job)
    try:
        if (job.target / MANIFEST).exists():
            if not job.append:
                return finished(job, read_manifest(job.target))
        else:
            check_empty(job.target)
        with _begun(job) as (job, base):
            return _pack(job, base, workers, progress)
    except OSError as error:
        raise ShardError(disk_error(error, job.target)) from error


@contextmanager
def _begun(job: PackJob) -> Iterator[tuple[PackJob, Manifest | None]]:
    """Locks the work of ``job``; yields it with its numbers, and the set that it adds to."""
    with only_one(job.state, job.target):
        base = read_manifest(job.target) if (job.target / MANIFEST).exists() else None
        if base is not None and not job.append:
            raise ConfigurationError(
                f"{job.target} was packed by another process just now. Start the command again."
            )
        job = job.after(base)
        if is_left_over(job.state, base):
            clear(job.state)
        settings = job.state / SETTINGS
        if settings.exists():
            refuse_other(json.loads(settings.read_bytes()), job, "half packed")
        else:
            write_whole(
                settings, json.dumps({**job.identity, "generation": job.generation}).encode()
            )
        yield job, base


def _pack(job: PackJob, base: Manifest | None, workers: int, progress: Progress) -> Manifest:
    records = read_records(job.state, job.target, job.first_shard)
    rest = Rest()
    try:
        sources = _sources(job, base, bool(records))
        # once, here: threads that load Pillow's plugins at the same time disturb each other
        Image.init()
        with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
            left = range(records[-1].next_position if records else 0, len(sources))
            try:
                images = prepared_images(sources, left, job.settings, pool, ahead=4 * workers)
                for record in write_shards(images, sources, records, job, progress, rest):
                    records.append(record)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return _finish(job, base, sources, records, rest)
    except ConfigurationError:
        if not records:
            clear(job.state)  # nothing to go on with, and the next command will be another
        raise


def _sources(job: PackJob, base: Manifest | None, is_begun: bool) -> Sources:
    listed = load_sources(job.state) if is_begun else None  # else nothing is packed by the list
    if listed is not None:
        refuse_changed(listed.identity, partial(of_sources, listed), job, base, "half packed")
        return listed
    first = () if base is None else base.classes
    if base is not None and job.classes is not None and list(job.classes[: len(first)]) != first:
        raise ConfigurationError(
            f"--classes does not begin with the {len(first)} classes of {job.target}, whose "
            f"numbers stay as they are. Leave --classes out, or write {job.target / MANIFEST} "
            "there with the new classes at the end."
        )
    listed = list_sources(job.source, job.state, job.settings.group_by_class, job.classes, first)
    if base is None:
        return listed
    return leave_out_there(
        job.state, already_there(of_set(job.target, base), of_sources(listed), job.target)
    )


def _finish(
    job: PackJob, base: Manifest | None, sources: Sources, records: list[ShardRecord], rest: Rest
) -> Manifest:
    if records:
        manifest = write_generation(job, base, sources, records, rest)
    elif base is None:
        rows = rest.report.splitlines(keepends=True)
        first_rows = b"".join(rows[:5]).decode("utf-8", "backslashreplace").rstrip()
        raise ConfigurationError(
            f"none of {len(rows)} images can be packed. The first of them:\n{first_rows}"
        )
    else:  # nothing to add
        counts = {name: rest.counts.get(name, 0) for name in COUNTED}
        counts["left out"] += sources.left_out
        manifest = replace(base, counts={**counts, "added": 0, "there": sources.there})
        write_whole(job.target / NOT_ADDED, HEADER + sources.report + rest.report)
    clear(job.state, ignore_errors=True)
    return manifest
