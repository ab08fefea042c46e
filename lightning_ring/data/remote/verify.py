"""Checks that a set at a URL is as it was packed."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning_ring.data.remote.cache import Cache
from lightning_ring.data.remote.mirror import OF_PACKING, Mirror
from lightning_ring.data.remote.options import Remote
from lightning_ring.data.remote.store import ObjectStore
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest, Shard, file_sha256
from lightning_ring.data.shards.verify import Progress, check_shard
from lightning_ring.errors import ShardError

_AT_ONCE = 2  # shards on the local disk; each comes by many requests


def verify_url(url: str, progress: Progress, options: Remote | None = None) -> tuple[Manifest, list[str]]:
    """The manifest of the newest generation at ``url``, and a line for every problem of its objects.

    All of them are read from the store, past the cache, through a temporary folder that holds two shards at most.

    Raises:
        ShardError: The manifest or the index is missing or damaged, or a shard is not as long as it was packed.
        StoreError: The store refuses or does not answer.
    """
    store = ObjectStore(url, options or Remote())
    with TemporaryDirectory(prefix="lightning-ring-") as temporary:
        folder = Path(temporary)
        mirror = Mirror(store, Cache(folder / "cache", sys.maxsize))  # compares the index
        manifest = mirror.manifest()
        index = ShardIndex(mirror.path, manifest)

        def place_of(name: str) -> Path:
            return folder / name.replace("/", "-")

        def fetched(name: str) -> Path:
            path = place_of(name)
            store.submit(store.download, name, path, lambda num_bytes: None).result()
            return path

        def look(shard: Shard) -> list[str]:
            try:
                path = fetched(shard.name)
                return check_shard(path, shard, manifest, lambda: index, f"{store.url}/{shard.name}")
            except ShardError as error:  # it was there a moment ago
                return [str(error)]
            finally:
                place_of(shard.name).unlink(missing_ok=True)

        problems = []
        for name in manifest.files:
            if Path(name).name not in OF_PACKING:
                continue
            try:
                found = file_sha256(fetched(name))
            except ShardError as error:  # the images are whole without it
                problems.append(str(error))
                continue
            if found != manifest.files[name]:
                problems.append(f"{store.url}/{name} has SHA-256 {found}, expected {manifest.files[name]}")
        done, total = 0, sum(shard.bytes for shard in manifest.shards)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for shard, found_in in zip(manifest.shards, pool.map(look, manifest.shards), strict=True):
                problems += found_in
                done += shard.bytes
                progress(done, total)
    return manifest, problems
