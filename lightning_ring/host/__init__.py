"""Facts and settings of the machine that a rank runs on: cores, malloc, file locks, random
generators; and here what differs where the system is not POSIX, which is Windows.
"""

from __future__ import annotations

from types import ModuleType

from lightning_ring.errors import ConfigurationError

fcntl: ModuleType | None
try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None

_WITHOUT_LIMIT = 65_536
_WINDOWS = 2048  # its C runtime allows 8,192 at most, and 512 streams before that


def require_posix(what: str) -> None:
    """Raises `ConfigurationError`: this is Windows."""
    if fcntl is None:
        raise ConfigurationError(
            f"{what} needs Linux or macOS: it starts, signals and watches processes as Windows "
            "does not. lightning_ring.optim and lightning_ring.schedules work here."
        )


def most_open_files() -> int:
    """The number of files that this process may hold open."""
    try:
        import resource
    except ModuleNotFoundError:
        return _WINDOWS
    limit: int = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return limit if limit != resource.RLIM_INFINITY else _WITHOUT_LIMIT


def require_open_files(number: int, what: str) -> None:
    """Let this process, ``what`` in the error, hold ``number`` files and connections open: its soft
    limit is raised if need be.

    Raises:
        ConfigurationError: The hard limit is lower.
    """
    try:
        import resource
    except ModuleNotFoundError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise ConfigurationError(
            f"{what} needs {number:,} open files, as connections to other ranks count as files, "
            f"and may have {hard:,}. Raise the limit on every host before the job starts: `ulimit "
            "-n 65536`, which the system (limits.conf: nofile) or the batch system has to allow."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
