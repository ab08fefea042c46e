"""Deaths and joins of a training, as its monitor and its timeline show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning_ring.elastic.membership import counted_ranks


@dataclass(slots=True)
class RankChanges:
    """Counts since the training began. `of_view` is called in every view that a rank has entered.

    Attributes:
        latest: The last change, as a sentence; empty before the first one.
        seconds: For which training stood still at the last change, on this rank.
    """

    deaths: int = 0
    joins: int = 0
    world_size: int = 0
    latest: str = ""
    seconds: float = 0.0
    members: tuple[int, ...] = ()

    def of_view(self, members: Sequence[int], step: int, seconds: float) -> bool:
        """``members`` are the numbers of the processes. Returns whether they are others than
        before.
        """
        before, self.members, self.world_size = self.members, tuple(members), len(members)
        if not before or set(before) == set(members):
            return False
        died = [member for member in before if member not in members]
        new = [member for member in members if member not in before]
        self.deaths += len(died)
        self.joins += len(new)
        self.seconds = seconds
        what = [f"{_processes(died)} died"] if died else []
        what += [f"{_processes(new)} joined"] if new else []
        self.latest = f"{', '.join(what)}: {counted_ranks(len(members))} after step {step}"
        return True

    def scalars(self) -> dict[str, float]:
        return {
            "ring/world_size": float(self.world_size),
            "ring/deaths": float(self.deaths),
            "ring/joins": float(self.joins),
        }

    def state_dict(self) -> dict[str, Any]:
        """What a process needs that joins now."""
        return {"deaths": self.deaths, "joins": self.joins, "members": self.members}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.deaths, self.joins, self.members = (
            state["deaths"],
            state["joins"],
            tuple(state["members"]),
        )


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
