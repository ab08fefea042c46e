"""Failures, deaths and departures of other ranks, as the job watch learns of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lightning_ring.errors import PeerFailedError

_TRANSPORT_WORDS = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "nccl error",
    "tcpstore",
)


def comes_from_a_peer(error: BaseException) -> bool:
    """Whether another rank caused ``error``: Gloo and NCCL see only a closed connection."""
    if isinstance(error, PeerFailedError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _TRANSPORT_WORDS)


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """``kind``: ``"failed"`` (it raised), ``"dead"`` (it vanished) or ``"left"`` (its script
    ended).

    ``echo``: it failed only because another one had. ``fit`` counts its fits, so that an old
    failure does not end a new fit. ``time`` is this process's monotonic clock.
    """

    kind: str
    rank: int
    host: str
    pid: int
    text: str = ""
    echo: bool = False
    fit: int = 0
    time: float = field(default_factory=time.monotonic)

    @property
    def lost(self) -> bool:
        """Whether the host or the link to it has gone, rather than the process."""
        return self.kind == "dead" and self.text != "closed"

    def __str__(self) -> str:
        name = f"rank {self.rank} (host {self.host}, pid {self.pid})"
        if self.kind == "failed":
            return f"{name} failed: {self.text}"
        if self.kind == "left":
            return (
                f"{name} has left the job: its script ended while other ranks were waiting for it"
            )
        if self.lost:
            return f"{name} was lost: {self.text} (its host is down, or the link to it is cut)"
        return (
            f"{name} died: its process ended without a word (killed, out of memory, or crashed in "
            "C code)"
        )
