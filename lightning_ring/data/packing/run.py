"""A packing from beginning to end: list the sources, write shard after shard, write the index, then
the manifest.

While it runs, ``DST/.packing`` holds the command, a record of each finished shard, and the shard
being written. A shard gets its name when it is whole and on the disk. Started again after whatever
ended it, packing goes on after the last finished shard, and ends with the bytes that it would have
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from lightning_ring.data.packing.image import PackSettings, prepared_images
from lightning_ring.data.packing.sources import Sources, list_sources
from lightning_ring.data.packing.writer import (
    PackJob,
    Progress,
    ShardRecord,
    count_treatments,
    read_records,
    report_of,
    write_generation,
    write_shards,
)
from lightning_ring.data.shards import MANIFEST, Manifest, ShardIndex, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.host.file_lock import claim, release
from lightning_ring.host.whole_file import write_whole

# the report of an append that added nothing, and so made no generation
NOT_ADDED = "index/left-out.csv"
_LOCK = ".lock"
_SETTINGS = "settings.json"

log = logging.getLogger(__name__)


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
            holds something else, or another process packs into it.
        ShardError: The disk is full or failing. What is finished is kept; the same call goes on
            from there.
    """
    job = PackJob(source.absolute(), target.absolute(), settings, classes)
    _check_paths(job)
    try:
        with only_one(job.target):
            if (job.target / MANIFEST).exists():
                base = read_manifest(job.target)
                was = _begun(job)
                # ended after its manifest had been written
                if was and was["generation"] <= base.generation:
                    shutil.rmtree(job.state)
                if not append:
                    return _packed_already(job, base)
                job = replace(job, base=base)
            return _pack(job, workers, progress)
    except OSError as error:
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = f" ({shutil.disk_usage(job.target).free / 2**20:.0f} MiB are free). Make room"
        raise ShardError(
            f"{error.filename or job.target} cannot be written: {error.strerror}{free}. Finished "
            "shards are kept: run the same command again, and it goes on after the last of them."
        ) from error


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Lock the folder ``target`` (made if it is not there) against other processes; the lock ends
    with this process.

    Raises `ConfigurationError`: another process has it.
    """
    target.mkdir(parents=True, exist_ok=True)
    file = os.open(target / _LOCK, os.O_RDWR | os.O_CREAT)
    try:
        is_locked = claim(file)
    except OSError as error:
        release(file)
        if error.errno != errno.EBUSY:
            raise
        raise ConfigurationError(
            f"another process is packing into {target}. Wait for it, or end it."
        ) from None
    if not is_locked:
        log.warning(
            "lightning_ring: %s has no locks. See to it that one process alone packs.", target
        )
    try:
        yield
    finally:
        release(file)


def _check_paths(job: PackJob) -> None:
    source, target = job.source, job.target
    if not source.exists():
        raise ConfigurationError(
            f"{source} is not there. Expected a folder with a folder for each class, or a CSV file."
        )
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(
            f"{target} is inside {source}: its shards would be taken for images. Choose another."
        )
    found = set(os.listdir(target)) if target.exists() else set()
    strangers = sorted(found - {_LOCK, "lost+found"})
    if strangers and not found & {MANIFEST, job.state.name}:
        raise ConfigurationError(
            f"{target} is not empty: it holds {strangers[0]!r} and no packing. Choose an empty "
            "folder, or one that is not there yet."
        )


def _begun(job: PackJob) -> dict[str, Any]:
    """The command that is half finished; empty if there is none."""
    settings = job.state / _SETTINGS
    return json.loads(settings.read_bytes()) if settings.exists() else {}


def _packed_already(job: PackJob, manifest: Manifest) -> Manifest:
    """``manifest``, if it is what ``job`` would write."""
    if manifest.generation:
        raise ConfigurationError(
            f"images were appended to {job.target} (generation {manifest.generation}). "
            "`lightning-ring pack --append` adds further images; choose another folder for "
            "another set."
        )
    _refuse_other({"source": manifest.source, **manifest.settings}, job, "packed already")
    _refuse_changed(manifest.identity, _sources(job), job, "packed already")
    return manifest


def _refuse_other(was: dict[str, object], job: PackJob, state: str) -> None:
    changed = [
        f"{name} {was.get(name)}, now {value}"
        for name, value in sorted(job.identity.items())
        if was.get(name) != value
    ]
    if changed:
        raise ConfigurationError(
            f"{job.target} is {state} with another command: {'; '.join(changed)}. Give the same "
            "arguments, choose another folder, or remove "
            f"{job.state if job.generation else job.target}."
        )


def _refuse_changed(identity: str | None, now: Sources, job: PackJob, state: str) -> None:
    if now.identity == identity:
        return
    what_next = "To pack them as they are now, choose another folder, or remove this one."
    if job.generation:
        what_next = (
            f"To append them as they are now, remove {job.state}: it holds the append that is half "
            "finished."
        )
    raise ConfigurationError(
        f"{job.target} is {state}, and {job.source} has changed since: names, classes, lengths or "
        f"times of its files are not those that were listed. Nothing was written; {job.target} "
        f"holds images and labels as they were. {what_next}"
    )


def _pack(job: PackJob, workers: int, progress: Progress) -> Manifest:
    was = _begun(job)
    if was:
        _refuse_other(was, job, "half packed")
    records = read_records(job)
    try:
        sources = _sources(job)
        if records:
            _refuse_changed(was.get("listed"), sources, job, "half packed")
        job.state.mkdir(exist_ok=True)
        about = {**job.identity, "generation": job.generation, "listed": sources.identity}
        write_whole(job.state / _SETTINGS, json.dumps(about).encode())
        # once, here: threads that load Pillow's plugins at the same time disturb each other
        Image.init()
        left = range(records[-1].next_position if records else 0, len(sources))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="pack")
        try:
            images = prepared_images(sources, left, job.settings, pool, ahead=4 * workers)
            # those that were written before an error are in the list too
            records.extend(write_shards(images, sources, records, job, progress))
        finally:
            pool.shutdown(cancel_futures=True)
        manifest = _finished(job, sources, records)
    except ConfigurationError:
        if not any(record.shard.samples for record in records):
            # nothing to go on with, and the next command will be another
            shutil.rmtree(job.state, ignore_errors=True)
        raise
    shutil.rmtree(job.state, ignore_errors=True)
    return manifest


def _sources(job: PackJob) -> Sources:
    first = job.base.classes
    if job.classes is not None and list(job.classes[: len(first)]) != first:
        raise ConfigurationError(
            f"--classes does not begin with the {len(first)} classes of {job.target}, whose "
            f"numbers stay as they are. Leave --classes out, or write {job.target / MANIFEST} "
            "there with the new classes at the end."
        )
    listed = list_sources(job.source, job.settings.group_by_class, job.classes, first)
    if not job.generation:
        return listed
    there = _already_there(job, listed)
    return replace(listed, order=listed.order[~there[listed.order]], there=int(there.sum()))


def _finished(job: PackJob, sources: Sources, records: list[ShardRecord]) -> Manifest:
    if any(record.shard.samples for record in records):
        return write_generation(job, sources, records)
    if not job.generation:
        rows = [row for record in records for row in record.report.splitlines(keepends=True)]
        first_rows = b"".join(rows[:5]).decode("utf-8", "backslashreplace").rstrip()
        raise ConfigurationError(
            f"none of {len(rows)} images can be packed. The first of them:\n{first_rows}"
        )
    write_whole(job.target / NOT_ADDED, b"".join(report_of(sources, records)))
    counts = count_treatments(sources, records)
    return replace(job.base, counts={**counts, "added": 0, "there": sources.there})


def _already_there(job: PackJob, now: Sources) -> npt.NDArray[np.bool_]:
    """For each image of ``now`` whether the set has it, by its name.

    Raises `ConfigurationError`: the name is there with another class, length or time.
    """
    was = ShardIndex(job.target, job.base)
    # 8 bytes a name, where a dict of all names would take some 200
    before = np.fromiter((hash(was.name(i)) for i in range(len(was))), np.int64)
    after = np.fromiter((hash(now.name(i)) for i in range(len(now.labels))), np.int64)
    there = np.zeros(len(now.labels), bool)
    others, stamps = [], was.column("stamps")
    for i, j in zip(*np.intersect1d(before, after, return_indices=True)[1:], strict=True):
        if was.name(i) == now.name(j):  # two names may have one hash
            there[j] = True
            same_class = job.base.classes[was.labels[i]] == now.classes[now.labels[j]]
            if not same_class or stamps[i] != now.stamps[j]:
                others.append(now.name(j))
    if others:
        raise ConfigurationError(
            f"{job.target} has {len(others)} images of these names with another class, length or "
            f"time, such as {others[0]}. Nothing was written. Give new images other names, or pack "
            "them into another folder (`Mixture` reads several); a packed image never changes."
        )
    return there
