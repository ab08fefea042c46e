"""How shards that lie elsewhere are read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_ring.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Remote:
    """How a `ShardDataset` reads from a URL.

    Args:
        cache: The folder of the cache, on a local disk; all processes of a host may share it. By default
            ``lightning_ring`` in ``$XDG_CACHE_HOME``, or in ``~/.cache``.
        cache_gb: The most that the cache takes, in GiB. What was not used for the longest time goes first.
        num_requests: Requests that a process has under way at a time.
        lookahead: Samples that a rank's loader asks for before it needs them.
        deadline: Seconds for which a request is repeated. After that it is an error.
        storage_options: Of fsspec's file system for the URL: credentials, ``endpoint_url``, ``headers``, ...
    """

    cache: str | os.PathLike[str] | None = None
    cache_gb: float = 50.0
    num_requests: int = 32
    lookahead: int = 1024
    deadline: float = 60.0
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # may hold a password

    def __post_init__(self) -> None:
        for name in ("cache_gb", "deadline"):
            if not getattr(self, name) > 0:
                raise ConfigurationError(f"Remote({name}={getattr(self, name)}) was given, expected more than 0.")
        for name, least in (("num_requests", 1), ("lookahead", 0)):
            if getattr(self, name) < least:
                raise ConfigurationError(f"Remote({name}={getattr(self, name)}) was given, expected {least} or more.")

    @property
    def folder(self) -> Path:
        if self.cache is not None:
            return Path(self.cache).expanduser().absolute()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_ring"

    @property
    def cache_bytes(self) -> int:
        return int(self.cache_gb * 2**30)


def is_url(root: str | os.PathLike[str]) -> bool:
    """Whether ``root`` is a URL such as ``s3://bucket/folder``, and not a path."""
    return isinstance(root, str) and "://" in root
