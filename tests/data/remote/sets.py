"""Sets at a URL, and orders of their images."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_ring.data import Remote, ShardDataset
from tests.data.remote.faulty_server import Server

SMALL = 700 * 1024 / 2**30  # GiB: less than the set, so that samples' own bytes are fetched


def opened(server: Server, remote: Remote, **changes: Any) -> ShardDataset:
    return ShardDataset(server.url, decode=False, remote=replace(remote, **changes))


def shuffled(size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).sample(range(size), size)


def taken(folder: Path) -> int:
    """Bytes that the cache takes on the disk."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    for link in Path("/proc/self/fd").iterdir():  # removed, and still open
        with suppress(FileNotFoundError):
            if str(folder) in (name := os.readlink(link)) and name.endswith(" (deleted)"):
                total += link.stat().st_blocks * 512
    return total
