"""Failures, deaths and departures of other ranks, as the job watch learns of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from lightning_ring.errors import PeerFailedError
from lightning_ring.job.watch.messages import Message

_TRANSPORT_WORDS = (
    "gloo/transport",
    "connection closed by peer",
    "connection reset by peer",
    "nccl error",
    "tcpstore",
)


def comes_from_a_peer(error: BaseException) -> bool:
    """Whether another rank caused ``error``: Gloo and NCCL see a closed connection, and not the
    reason.
    """
    if isinstance(error, PeerFailedError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _TRANSPORT_WORDS)


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """``kind``: ``"failed"`` (it raised), ``"dead"`` (it vanished) or ``"left"`` (its script
    ended).

    ``echo``: it failed only because another one had. ``fit`` counts its fits, so that an old
    failure does not end a new fit. ``time`` is this process's monotonic clock when the message
    came.
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


class PeerEvents:
    """Failures, deaths and departures of the other ranks: in rank 0 all, in other ranks the first
    ones. Not thread-safe.
    """

    def __init__(self) -> None:
        self.failures: list[PeerEvent] = []
        self.left: dict[int, PeerEvent] = {}
        self.gone: set[int] = set()
        self.all_left = False  # this rank included

    def add(self, message: Message) -> None:
        """Add a message of another rank, as the relay passed it on."""
        kind, rank = message["kind"], message["rank"]
        self.all_left = self.all_left or kind == "all left"
        if kind in ("dead", "gone"):
            self.gone.add(rank)
        if kind in ("failed", "dead", "left"):
            event = PeerEvent(
                **{name: message[name] for name in PeerEvent.__slots__ if name in message}
            )
            if kind == "left":
                self.left[rank] = event
            else:
                self.failures.append(event)

    def failure(self, fit: int) -> PeerEvent | None:
        """The first failure in ``fit`` that is no echo, else the first echo. A dead rank counts
        in every fit.
        """
        current = [event for event in self.failures if event.kind == "dead" or event.fit == fit]
        return min(current, key=lambda event: (event.echo, event.time), default=None)
