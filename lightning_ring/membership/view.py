"""A view: the ranks of one generation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class View:
    """The ranks of one generation.

    ``members`` are numbers of processes, by rank; a process keeps its number, and no other process
    gets it. ``step`` is the number of optimizer steps that all members but the ``newcomers`` have
    finished when the generation begins: a member that finished one less finishes it first. `None`:
    no member has state, the training begins. ``last``: why the job ends with this view, in which
    its members only put their state together and save it; else nothing.
    """

    generation: int
    members: tuple[int, ...]
    step: int | None = None
    newcomers: tuple[int, ...] = ()
    last: str = ""

    def as_message(self) -> dict[str, Any]:
        return {"kind": "view", **asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> View:
        members, newcomers = tuple(message["members"]), tuple(message["newcomers"])
        return cls(message["generation"], members, message["step"], newcomers, message["last"])
