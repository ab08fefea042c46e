"""One process of a job that goes on when ranks die, and how its end is told."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_ring.launch.child import Child
from lightning_ring.launch.remote import RemoteChild
from lightning_ring.launch.supervisor import signal_name

_CODES_OF_SIGNALS = range(129, 193)  # a shell's, for a program that a signal ended


@dataclass(slots=True, eq=False)
class JobProcess:
    """A process of the job. Its ``slot`` is the same as that of the process that it replaces."""

    number: int
    slot: int
    child: Child | RemoteChild
    joins: bool  # a job whose ranks train already
    started: float
    guarded: bool = False
    identified: bool = False
    removed: str = ""  # why the steward had it killed, where that is not its own death
    kill_at: float | None = None  # when what is left of its session ends
    died: float | None = None  # when it was seen to be dead
    ended: bool = False  # the kernel has told its exit code, which may take seconds longer
    outlived: bool = False  # the job went on without it, and ends for another reason, if it ends

    @property
    def name(self) -> str:
        child = self.child
        where = f"host {child.host.host.name}, " if isinstance(child, RemoteChild) else ""
        return f"{child.name} ({where}pid {child.program or child.pid})"

    def death(self, code: int, reason: str) -> str:
        """Who died how, without a full stop. ``reason``: what else is known, or nothing."""
        how = (
            f"was killed by signal {-code} ({signal_name(-code)})"
            if code < 0
            else f"ended with exit code {code}"
        )
        if isinstance(self.child, RemoteChild) and self.child.is_lost:
            how = "is lost with its host"
        return f"{self.name} {how}" + f" ({reason})" * bool(reason)


def by_signal(code: int) -> bool:
    """Whether a signal ended the program, also as a shell reports it (128 + n)."""
    return code < 0 or code in _CODES_OF_SIGNALS
