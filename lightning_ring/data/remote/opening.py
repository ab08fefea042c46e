"""A set at a URL, opened."""

from __future__ import annotations

from lightning_ring.data.remote.cache import Cache
from lightning_ring.data.remote.files import RemoteFiles
from lightning_ring.data.remote.mirror import Mirror
from lightning_ring.data.remote.options import Remote
from lightning_ring.data.remote.store import ObjectStore
from lightning_ring.data.shards.index import ShardIndex
from lightning_ring.data.shards.manifest import Manifest
from lightning_ring.errors import ShardError


def open_remote(url: str, options: Remote, generation: int | None = None) -> tuple[Manifest, ShardIndex, RemoteFiles]:
    """The set that lies at ``url``: its newest generation, or the one that is asked for.

    Raises:
        ShardError: No finished packing is there, or not that generation, or an object is missing or not as
            long as it was packed.
        StoreError: The store refuses or does not answer, or the cache cannot be written.
    """
    store, cache = ObjectStore(url, options), Cache(options.folder, options.cache_bytes)
    mirror = Mirror(store, cache, generation)
    try:
        manifest = mirror.manifest()
        index = ShardIndex(mirror.path, manifest)
    except ShardError:  # the copy was compared with its checksums when it was made: the disk has damaged it since
        mirror.forget()
        mirror = Mirror(store, cache, generation)
        manifest = mirror.manifest()
        index = ShardIndex(mirror.path, manifest)
    return manifest, index, RemoteFiles(store, cache, manifest.shards, mirror)
