"""What needs a POSIX system says so elsewhere."""

from __future__ import annotations

from types import ModuleType

from lightning_ring.errors import ConfigurationError

fcntl: ModuleType | None
try:
    import fcntl
except ModuleNotFoundError:
    fcntl = None


def require_posix(what: str) -> None:
    """Raises `ConfigurationError`: this is Windows."""
    if fcntl is None:
        raise ConfigurationError(
            f"{what} needs Linux or macOS: it starts, signals and watches processes as Windows "
            "does not. lightning_ring.optim and lightning_ring.schedules work here."
        )
