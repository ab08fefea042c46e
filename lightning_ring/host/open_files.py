"""The number of files that this process may hold open."""

from __future__ import annotations

_WITHOUT_LIMIT = 65_536
_WINDOWS = 2048  # its C runtime allows 8,192 at most, and 512 streams before that


def most_open_files() -> int:
    try:
        import resource
    except ModuleNotFoundError:
        return _WINDOWS
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit != resource.RLIM_INFINITY else _WITHOUT_LIMIT
