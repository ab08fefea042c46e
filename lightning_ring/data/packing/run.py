"""A packing from beginning to end: list the sources, write shard after shard, write the index, then the manifest.

While it runs, ``DST/.packing`` holds the list, a record of each finished shard, and the shard being written. A shard
gets its name when it is whole and on the disk. Started again after whatever ended it, packing goes on after the last
finished shard, and ends with the bytes that it would have written uninterrupted. If the source has changed meanwhile,
nothing is written: the error says what has changed.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

from PIL import Image

from lightning_ring.data.packing.changes import Listed, describe_changes, of_shards, of_sources
from lightning_ring.data.packing.files import report_row, whole_file, write_whole
from lightning_ring.data.packing.finish import write_manifest
from lightning_ring.data.packing.image import PackedImage, prepared_images
from lightning_ring.data.packing.settings import PackSettings
from lightning_ring.data.packing.shard_writer import ShardRecord, ShardWriter, read_records, shard_name, write_record
from lightning_ring.data.packing.sources import Sources, list_sources, load_sources
from lightning_ring.data.shards.manifest import MANIFEST, Manifest, Shard, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError
from lightning_ring.host.file_lock import claim, release

PACKING = ".packing"
Progress = Callable[[int, int, int], None]  # sources done, sources in all, left out so far


def pack(
    source: Path,
    target: Path,
    settings: PackSettings,
    workers: int,
    progress: Progress,
    classes: Sequence[str] | None = None,
) -> Manifest:
    """Pack ``source`` (an image folder or a CSV) into ``target``, on ``workers`` threads; nothing if it is packed.

    Args:
        classes: Their names in the order of their numbers. Left out, they are numbered in the order of their names.

    Raises:
        ConfigurationError: ``source`` cannot be packed, has changed since it was, or ``target`` holds something else.
        ShardError: The disk is full or failing. What is finished is kept; the same call goes on from there.
    """
    source, target = source.absolute(), target.absolute()
    if not source.exists():
        expected = "a folder with a folder for each class, or a CSV file"
        raise ConfigurationError(f"{source} is not there. Expected {expected}.")
    if target.resolve().is_relative_to(source.resolve()):
        raise ConfigurationError(f"{target} is inside {source}: its shards would be taken for images. Choose another.")
    try:
        if (target / MANIFEST).exists():
            return _finished(source, target, settings, classes)
        _check_empty(target)
        state = target / PACKING
        state.mkdir(parents=True, exist_ok=True)
        with _only_one(state):
            file = state / "settings.json"
            if file.exists():
                _refuse_other(json.loads(file.read_bytes()), source, settings, target, "half packed")
            else:
                write_whole(file, json.dumps(_identity(source, settings)).encode())
            return _pack(source, target, settings, workers, progress, classes)
    except OSError as error:
        raise ShardError(_disk_error(error, target)) from error


def _pack(
    source: Path,
    target: Path,
    settings: PackSettings,
    workers: int,
    progress: Progress,
    classes: Sequence[str] | None,
) -> Manifest:
    state = target / PACKING
    records = read_records(state, target)
    try:
        listed = load_sources(state) if records else None  # else nothing is packed by the list
        if listed is not None:
            _refuse_changed(listed.identity, partial(of_sources, listed), source, classes, target, "half packed")
        sources = listed or list_sources(source, state, settings.group_by_class, classes)
        Image.init()  # once, here: threads that load Pillow's plugins at the same time disturb each other
        with ThreadPoolExecutor(workers, thread_name_prefix="pack") as pool:
            start = records[-1].next_position if records else 0
            try:
                images = prepared_images(sources, start, settings, pool, ahead=4 * workers)
                for record in _write_shards(images, sources, records, target, settings.shard_bytes, progress):
                    records.append(record)
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
    except ConfigurationError:
        if not records:
            shutil.rmtree(state)  # nothing to go on with, and the next command will be another
        raise
    return write_manifest(target, source, settings, sources, records)


def _write_shards(
    images: Iterator[tuple[int, PackedImage | str]],
    sources: Sources,
    records: list[ShardRecord],
    target: Path,
    shard_bytes: int,
    progress: Progress,
) -> Iterator[ShardRecord]:
    """Write the shards that follow ``records``, yielding each once it is on the disk."""
    number, first = len(records), sum(record.shard.samples for record in records)
    left_out = sum(record.counts.get("left out", 0) for record in records)
    pending = next(images, None)
    while pending is not None:
        name, counts, rows = shard_name(number), Counter[str](), list[bytes]()
        with whole_file(target / name, through=target / PACKING / "shard.part") as file:
            shard = ShardWriter(file, first)
            while pending is not None:
                position, image = pending
                if isinstance(image, str):
                    counts["left out"] += 1
                    left_out += 1
                    rows.append(report_row("left out", os.fsdecode(sources.name(position)), image))
                elif shard.samples and shard.length_with(len(image.data)) > shard_bytes:
                    break
                else:
                    counts[image.how] += 1
                    counts["not turned"] += image.lies
                    shard.add(image.data, image.extension, sources.label(position), position)
                    if image.note:
                        rows.append(report_row("converted", os.fsdecode(sources.name(position)), image.note))
                progress(position + 1, len(sources), left_out)
                pending = next(images, None)
            sha256 = shard.finish()
            if not shard.samples:
                first_rows = b"".join(rows[:5]).decode("utf-8", "backslashreplace").rstrip()
                raise ConfigurationError(f"none of {len(rows)} images can be packed. The first of them:\n{first_rows}")
        done = Shard(name, shard.bytes, shard.samples, sha256)
        following = len(sources) if pending is None else pending[0]
        record = ShardRecord(done, following, dict(counts), b"".join(rows), shard.arrays())
        write_record(target / PACKING, number, record)
        yield record
        number, first = number + 1, first + shard.samples


@contextmanager
def _only_one(state: Path) -> Iterator[None]:
    """Lock the packing against a second process; the lock ends with this one, however it ends."""
    file = os.open(state / "lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            claim(file)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise ConfigurationError(
                f"another process is packing into {state.parent}. Wait for it, or end it."
            ) from None
        yield
    finally:
        release(file)


def _identity(source: Path, settings: PackSettings) -> dict[str, object]:
    return {"source": str(source), **asdict(settings)}


def _check_empty(target: Path) -> None:
    if not target.exists() or (target / PACKING).exists():
        return
    if strangers := sorted(name for name in os.listdir(target) if name != "lost+found"):
        raise ConfigurationError(
            f"{target} is not empty: it holds {strangers[0]!r} and no packing. Choose an empty folder, or one that is "
            "not there yet."
        )


def _finished(source: Path, target: Path, settings: PackSettings, classes: Sequence[str] | None) -> Manifest:
    manifest = read_manifest(target)
    _refuse_other({"source": manifest.source, **manifest.settings}, source, settings, target, "packed already")
    if (target / PACKING).exists():
        shutil.rmtree(target / PACKING)  # the manifest was written, and then something ended the process
    _refuse_changed(manifest.identity, lambda: of_shards(target, manifest), source, classes, target, "packed already")
    return manifest


def _refuse_changed(
    identity: str, was: Callable[[], Listed], source: Path, classes: Sequence[str] | None, target: Path, state: str
) -> None:
    """List ``source`` again; an error where it is not what was listed for ``target``."""
    with tempfile.TemporaryDirectory(prefix="lightning-ring-") as folder:
        now = list_sources(source, Path(folder), True, classes)
        if now.identity == identity:
            return
        changes = describe_changes(was(), of_sources(now))
    raise ConfigurationError(
        f"{target} is {state}, and {source} has changed since: {changes}. Nothing was written; {target} holds images "
        "and labels as they were. To pack them as they are now, choose another folder, or remove this one."
    )


def _refuse_other(was: dict[str, object], source: Path, settings: PackSettings, target: Path, state: str) -> None:
    now = _identity(source, settings)
    if changed := [f"{name} {was.get(name)}, now {now[name]}" for name in now if was.get(name) != now[name]]:
        raise ConfigurationError(
            f"{target} is {state} with another command: {'; '.join(changed)}. Give the same arguments, choose another "
            "folder, or remove this one."
        )


def _disk_error(error: OSError, target: Path) -> str:
    where = error.filename or target
    kept = "Finished shards are kept: run the same command again, and it goes on after the last of them."
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        free = shutil.disk_usage(target).free / 2**20
        return f"{where} cannot be written: {error.strerror} ({free:.0f} MiB are free). Make room. {kept}"
    return f"{where}: {error.strerror}. {kept}"
