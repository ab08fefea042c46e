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

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from PIL import Image

from lightning_ring.data.packing.changes import already_there, of_set, of_sources
from lightning_ring.data.packing.files import HEADER, write_whole
from lightning_ring.data.packing.finish import COUNTED, write_generation
from lightning_ring.data.packing.image import prepared_images
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.lock import clear, only_one
from lightning_ring.data.packing.refusals import (
    SETTINGS,
    check_empty,
    check_paths,
    disk_error,
    finished,
    is_left_over,
    refuse_changed,
    refuse_other,
)
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_loop import Progress, Rest, write_shards
from lightning_ring.data.packing.shard_writer import ShardRecord, read_records
from lightning_ring.data.packing.sources import Sources, leave_out_there, list_sources, load_sources
from lightning_ring.data.shards.manifest import MANIFEST, Manifest, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError

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
