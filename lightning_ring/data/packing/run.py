"""A packing from beginning to end: list the sources, write shard after shard, write the index, then the manifest.

While it runs, ``DST/.packing`` holds the list, a record of each finished shard, and the shard being written. A shard
gets its name when it is whole and on the disk. Started again after whatever ended it, packing goes on after the last
finished shard, and ends with the bytes that it would have written uninterrupted. If the source has changed meanwhile,
nothing is written: the error says what has changed.

Several processes may pack a part of the source each, on one host or on several that share the folder. Each has a folder
of its own in ``DST/.packing``; the last to end writes the index and the manifest for all.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from lightning_ring.data.packing.changes import already_there, of_set, of_sources
from lightning_ring.data.packing.files import HEADER, write_whole
from lightning_ring.data.packing.finish import COUNTED, write_manifest
from lightning_ring.data.packing.image import prepared_images
from lightning_ring.data.packing.job import PackJob
from lightning_ring.data.packing.refusals import (
    check_empty,
    check_paths,
    disk_error,
    finished,
    refuse_changed,
    refuse_other,
)
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_loop import Progress, Rest, write_shards
from lightning_ring.data.packing.shard_writer import ShardRecord, read_records
from lightning_ring.data.packing.sources import Sources, leave_out_there, list_sources, load_sources
from lightning_ring.data.sets.lock import PACKING, SETTINGS, clear, is_unfinished, only_one
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import MANIFEST, Manifest, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError

NOT_ADDED = "index/left-out.csv"  # the report of an append that added nothing, and so made no generation
_DONE = "done.json"


def pack(
    source: Path,
    target: Path,
    settings: PackSettings,
    workers: int,
    progress: Progress,
    classes: Sequence[str] | None = None,
) -> Manifest:
    """`run_job` for a new set, packed by this process alone."""
    manifest = run_job(PackJob(source, target, settings, classes), workers, progress)
    assert manifest is not None
    return manifest


def run_job(job: PackJob, workers: int, progress: Progress) -> Manifest | None:
    """Pack what ``job`` says, on ``workers`` threads; nothing if it is packed.

    Returns the manifest, or None where other parts have not ended yet. A manifest's ``counts`` are those of this
    packing, also where nothing was added.

    Raises:
        ConfigurationError: The source cannot be packed, has changed since it was, or the target holds something else.
        ShardError: The disk is full or failing. What is finished is kept; the same call goes on from there.
    """
    job = replace(job, source=job.source.absolute(), target=job.target.absolute())
    check_paths(job)
    try:
        if not job.append and (job.target / MANIFEST).exists():
            return finished(job, read_manifest(job.target))
        if not (job.target / MANIFEST).exists():
            check_empty(job.target)
        with _begun(job) as (job, base):
            return _pack(job, base, workers, progress)
    except OSError as error:
        raise ShardError(disk_error(error, job.target)) from error


@contextmanager
def _begun(job: PackJob) -> Iterator[tuple[PackJob, Manifest | None]]:
    """Locks the work of ``job``; yields it with its numbers, and the set that it adds to."""
    state, several = job.target / PACKING, job.parts > 1
    with only_one(state, job.target, wait=several):
        base = read_manifest(job.target) if (job.target / MANIFEST).exists() else None
        if base is not None and not job.append:
            raise ConfigurationError(f"{job.target} was packed by another process just now. Start the command again.")
        job = job.after(base)
        if not is_unfinished(job.target, base):
            clear(state)  # what a packing left that was killed after it had made its generation
        _refuse_other_parts(job, base)
        job.state.mkdir(exist_ok=True)
        mine = job.state / SETTINGS
        for begun in (mine, *state.glob(f"part-*/{SETTINGS}")):
            if begun.exists():
                refuse_other(json.loads(begun.read_bytes()), job, "half packed")
        if not mine.exists():
            write_whole(mine, json.dumps({**job.identity, "generation": job.generation}).encode())
        if not several:
            yield job, base
            return
    with only_one(job.state, job.target):
        yield job, base


def _refuse_other_parts(job: PackJob, base: Manifest | None) -> None:
    state = job.target / PACKING
    begun = {path.parent.name for path in state.glob(f"part-*/{SETTINGS}")}
    mine = {job.state_of(part).name for part in range(job.parts)} if job.parts > 1 else set()
    others = sorted(begun - mine) + (["one part"] if job.parts > 1 and (state / SETTINGS).exists() else [])
    if others:
        asked = f"part {job.part + 1} of {job.parts}" if job.parts > 1 else "a packing in one part"
        raise ConfigurationError(
            f"{job.target} is half packed in other parts ({', '.join(others)}), and this is {asked}. Pack in the same "
            f"number of parts, or give it up: {_how_to_give_up(job, base)}."
        )


def _how_to_give_up(job: PackJob, base: Manifest | None) -> str:
    return f"remove {job.target}" if base is None else f"`lightning-ring prune --unfinished {job.target}`"


def _pack(job: PackJob, base: Manifest | None, workers: int, progress: Progress) -> Manifest | None:
    records = read_records(job.state, job.target, job.shard_name)
    rest = Rest()
    try:
        sources = _sources(job, base, bool(records))
        Image.init()  # once, here: threads that load Pillow's plugins at the same time disturb each other
        with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
            positions = job.positions(len(sources))
            left = range(records[-1].next_position if records else positions.start, positions.stop)
            try:
                images = prepared_images(sources, left, job.settings, pool, ahead=4 * workers)
                for record in write_shards(images, sources, records, job, progress, rest):
                    records.append(record)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        if job.parts > 1:
            return _finish_parts(job, base, sources, rest)
        return _finish(job, base, sources, [records], rest)
    except ConfigurationError:
        if not records:
            clear(job.state)  # nothing to go on with, and the next command will be another
        raise


def _sources(job: PackJob, base: Manifest | None, is_begun: bool) -> Sources:
    listed = load_sources(job.state) if is_begun else None  # else nothing is packed by the list
    if listed is not None:
        refuse_changed(listed.identity, partial(of_sources, listed), job, base, "half packed")
        return listed
    if base is None:
        return list_sources(job.source, job.state, job.settings.group_by_class, job.classes, (), job.prefix)
    if job.classes is not None and list(job.classes[: len(base.classes)]) != base.classes:
        raise ConfigurationError(
            f"--classes does not begin with the {len(base.classes)} classes of {job.target}, whose numbers stay as "
            f"they are. Leave --classes out, or write {job.target / MANIFEST} there with the new classes at the end."
        )
    listed = list_sources(job.source, job.state, job.settings.group_by_class, job.classes, base.classes, job.prefix)
    there = already_there(of_set(job.target, base), of_sources(listed), job.target, job.keep_known)
    deleted = set() if job.restore else set(ShardIndex(job.target, base).deleted)
    if deleted:
        there |= np.fromiter((os.fsdecode(listed.listed_name(i)) in deleted for i in range(len(there))), bool)
    return leave_out_there(job.state, there)


def _finish(
    job: PackJob, base: Manifest | None, sources: Sources, parts: list[list[ShardRecord]], rest: Rest
) -> Manifest:
    if any(parts):
        manifest = write_manifest(job, base, sources, parts, rest)
    elif base is None:
        rows = rest.report.splitlines(keepends=True)
        first_rows = b"".join(rows[:5]).decode("utf-8", "backslashreplace").rstrip()
        raise ConfigurationError(f"none of {len(rows)} images can be packed. The first of them:\n{first_rows}")
    else:  # nothing to add
        counts = {name: rest.counts.get(name, 0) for name in COUNTED}
        counts["left out"] += sources.left_out
        manifest = replace(base, counts={**counts, "added": 0, "there": sources.there})
        write_whole(job.target / NOT_ADDED, HEADER + sources.report + rest.report)
    clear(job.target / PACKING, ignore_errors=True)
    return manifest


def _finish_parts(job: PackJob, base: Manifest | None, sources: Sources, rest: Rest) -> Manifest | None:
    """Say that this part is done; the last one makes the generation."""
    order = hashlib.sha256(np.ascontiguousarray(sources.order).data).hexdigest()
    listed = [sources.identity, order]  # each part has mixed the whole list by itself
    done = {"listed": listed, "counts": rest.counts, "report": rest.report.decode("latin-1")}
    write_whole(job.state / _DONE, json.dumps(done).encode())
    with only_one(job.target / PACKING, job.target, wait=True):
        newest = read_manifest(job.target) if (job.target / MANIFEST).exists() else None
        if newest is not None and newest.generation >= job.generation:
            clear(job.target / PACKING, ignore_errors=True)
            return newest  # another part has ended meanwhile, and found this one done
        states = [job.state_of(part) for part in range(job.parts)]
        if not all((state / _DONE).exists() for state in states):
            return None
        ends = [json.loads((state / _DONE).read_bytes()) for state in states]
        if others := [i + 1 for i, end in enumerate(ends) if end["listed"] != listed]:
            raise ConfigurationError(
                f"{job.source} was another one for part {others[0]} of {job.parts} than for part {job.part + 1}: it "
                "has changed while it was packed, or hosts have other versions of numpy. Give it up "
                f"({_how_to_give_up(job, base)}), and pack it again when it no longer changes."
            )
        everyone = [replace(job, part=part) for part in range(job.parts)]
        records = [read_records(each.state, job.target, each.shard_name) for each in everyone]
        counts: dict[str, int] = {}
        for end in ends:
            counts = {name: counts.get(name, 0) + end["counts"].get(name, 0) for name in {*counts, *end["counts"]}}
        rest = Rest(counts, b"".join(end["report"].encode("latin-1") for end in ends))
        return _finish(job, base, sources, records, rest)
