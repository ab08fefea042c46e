"""Who died in a job that went on, when and how, and what replaces it."""

from __future__ import annotations

import time

from lightning_ring.launch.respawn import RespawnLimits, Respawns


class Deaths:
    """``limits``: of respawns, `None` for none.

    Attributes:
        told: One line for each death, with the time of day.
        given_up: One line for each slot in which no further process is started.
    """

    def __init__(self, limits: RespawnLimits | None) -> None:
        self.told: list[str] = []
        self.given_up: dict[int, str] = {}
        self._respawns = Respawns(limits) if limits is not None else None

    @property
    def pending(self) -> int:
        """The number of processes that are to start later."""
        return self._respawns.pending if self._respawns is not None else 0

    def take_due(self, now: float) -> list[int]:
        """The slots whose next process is to start now."""
        return self._respawns.take_due(now) if self._respawns is not None else []

    def add(self, death: str, slot: int, lived: float, *, replaced: bool) -> str:
        """Note ``death``, a sentence without its end; ``replaced`` if the limits allow. Returns
        the rest of it.
        """
        self.told.append(f"{time.strftime('%H:%M:%S')} {death}")
        if self._respawns is None or not replaced:
            return ""
        if self._respawns.died(slot, time.monotonic(), lived):
            return ", and a new process replaces it"
        count = self._respawns.in_a_row[slot]
        self.given_up[slot] = (
            f"slot {slot} stays empty, {count} processes died one after the other; the last: "
            f"{death}"
        )
        return f"; no other process replaces it, after {count} deaths in a row"
