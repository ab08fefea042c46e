"""``lightning-ring pack --verify``: a set compared with its checksums, in a folder or at a URL."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_ring.cli.sets.running import count
from lightning_ring.errors import ConfigurationError


def verify_set(paths: Sequence[Path | str], workers: int, bar: Any) -> int:
    """List what is damaged; 1 if that is anything."""
    if len(paths) != 1:
        raise ConfigurationError(f"--verify takes DST alone, got {len(paths)} paths.")
    (root,) = paths
    from lightning_ring.data.shards.manifest import read_manifest
    from lightning_ring.data.shards.verify import verify

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    if isinstance(root, str):
        from lightning_ring.data.remote.verify import verify_url

        manifest, problems = verify_url(root, progress)
    else:
        manifest, problems = read_manifest(root), verify(root, workers, progress)
    bar.close()
    for problem in problems:
        print(problem)
    if problems:
        print(
            f"{root}: {count(len(problems), 'problem')}. Restore these files, or pack the images again.",
            file=sys.stderr,
        )
        return 1
    images, shards = count(manifest.samples, "image"), count(len(manifest.shards), "shard")
    print(f"{root}: {images} in {shards}, all as they were packed.")
    return 0
