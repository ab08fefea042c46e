"""Several sets into one: their shards are linked (copied between disks), their rows joined."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lightning_ring.data.packing.files import link_or_copy, write_whole
from lightning_ring.data.packing.shard_writer import shard_name
from lightning_ring.data.packing.sources import check_distinct
from lightning_ring.data.sets.generation import joined_metadata, new_shards, write_generation
from lightning_ring.data.sets.lock import PACKING, SETTINGS, changing, clear, only_one
from lightning_ring.data.sets.repeated import names_of, without_repeated
from lightning_ring.data.sets.rows import SetRows
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import MANIFEST, Manifest, check_lengths, read_manifest
from lightning_ring.errors import ConfigurationError, ShardError


def merge_sets(sources: Sequence[Path], target: Path, prefixes: bool = False) -> Manifest:
    """Add the newest generations of ``sources``, in their order, to the set in ``target``, new or not.

    Classes go by name: those of ``target`` (or of the first source) keep their numbers, new ones follow. Shards are
    hard links where the file system has them, else copies; deleted images are in them still. Images that ``target`` has
    already, or that were deleted from it, are left out. What was deleted from a source is deleted here too: an append
    does not bring it back.

    Args:
        prefixes: Put the name of its folder and ``/`` before the names of each source's images.

    Raises:
        ConfigurationError: Two different images have one name, classes cannot be told apart, columns differ in kind, or
            ``target`` holds something else.
        ShardError: A source is no set, or is damaged.
    """
    sources, target = [Path(source).absolute() for source in sources], Path(target).absolute()
    if len({path.resolve() for path in (*sources, target)}) != len(sources) + 1:
        raise ConfigurationError("a set was named twice. Expected each source once, and another folder to merge into.")
    for source in sources:
        if problems := check_lengths(source, read_manifest(source).shards):
            raise ShardError("\n".join([*problems, "Restore what is missing or damaged before it is merged."]))
    if (target / MANIFEST).exists():
        with changing(target) as base, new_shards(target, base) as made:
            return _merge(sources, target, base, prefixes, made)
    asked = {"merge": [str(source) for source in sources], "prefixes": prefixes, "generation": 0}
    _check_target(target, asked)
    with only_one(target / PACKING, target):
        if (target / MANIFEST).exists():
            raise ConfigurationError(f"{target} was made by another process just now. Start the command again.")
        write_whole(target / PACKING / SETTINGS, json.dumps(asked).encode())
        _remove_links(target)  # of a merge that was killed
        try:
            with new_shards(target, None) as made:
                manifest = _merge(sources, target, None, prefixes, made)
        except (ConfigurationError, ShardError):
            clear(target / PACKING)
            raise
        clear(target / PACKING, ignore_errors=True)
        return manifest


def _check_target(target: Path, asked: dict[str, object]) -> None:
    if not target.exists():
        return
    settings = target / PACKING / SETTINGS
    if settings.exists() and json.loads(settings.read_bytes()) == asked:
        return  # it was killed; its links are made anew
    if found := sorted(path.name for path in target.iterdir() if path.name not in (PACKING, "lost+found")):
        raise ConfigurationError(
            f"{target} is not empty: it holds {found[0]!r} and no set. Choose a set, an empty folder, or one that is "
            "not there yet."
        )


def _remove_links(target: Path) -> None:
    for path in target.glob("shard-*.tar"):
        path.unlink()


def _merge(sources: Sequence[Path], target: Path, base: Manifest | None, prefixes: bool, made: list[str]) -> Manifest:
    """The generation of ``base`` and ``sources``. Names of shards are added to ``made`` as they are linked."""
    parts = [] if base is None else [SetRows(target, base)]
    classes = [] if base is None else list(base.classes)
    for source in sources:
        manifest = read_manifest(source)
        known = set(classes)
        classes += [name for name in manifest.classes if name not in known]
        check_distinct(classes, source)
        numbers = {name: number for number, name in enumerate(classes)}
        of_class = np.array([numbers[name] for name in manifest.classes], np.int32)
        labels = of_class[ShardIndex(source, manifest).labels]
        parts.append(SetRows(source, manifest, labels=labels, prefix=f"{source.name}/" if prefixes else ""))
    deleted = set() if base is None else set(parts[0].index.deleted)
    all_parts, parts = parts, without_repeated(parts, {os.fsencode(name) for name in deleted})
    gone = _deleted(all_parts, parts)
    if base is not None and len(parts) == 1 and gone == deleted:
        return base  # all are there already
    joined_metadata(parts)  # an error before anything is written
    first = parts[0].manifest
    number = 0 if base is None else base.free_shard
    for part in parts if base is None else parts[1:]:
        renamed = []
        for shard in part.shards:
            name = shard_name(number)
            (target / name).unlink(missing_ok=True)  # of a merge that was killed
            link_or_copy(part.root / shard.name, target / name)
            made.append(name)
            renamed.append(replace(shard, name=name))
            number += 1
        part.shards = renamed
    names = ", ".join(map(str, sources))
    plan = replace(
        first,
        classes=classes,
        files={},
        source=names,
        identity=hashlib.sha256("".join(part.manifest.fingerprint for part in parts).encode()).hexdigest(),
        counts={},
        generation=0 if base is None else base.generation + 1,
        change=f"merge {names}",
        next_shard=number,
        next_key=sum(part.manifest.free_key for part in parts),
    )
    return write_generation(target, plan, parts, base, deleted=gone)


def _deleted(sources: Sequence[SetRows], merged: Sequence[SetRows]) -> set[str]:
    """Names that were deleted from one of ``sources``, and that none of ``merged`` has."""
    gone = {os.fsencode(part.prefix + name) for part in sources for name in part.index.deleted}
    there = {name for part in merged for name in names_of(part) if name in gone} if gone else set()
    return {os.fsdecode(name) for name in gone - there}
