"""Which optimizer step counts after an interruption, from what the remaining ranks report.

A rank steps its optimizer only after a commit barrier, which it enters with the complete averages
of the step. When some rank has finished step k + 1, every other rank of its view therefore holds
the complete averages of step k + 1, or has finished it too. So a finished step is never lost, and
no rank has to give one back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_ring.errors import RingError


class DisagreementError(RingError):
    """Ranks reported steps that the commit barrier rules out."""


@dataclass(frozen=True, slots=True)
class Report:
    """Where a rank stands when its view is over.

    ``step``: number of optimizer steps that it has finished; `None` for a newcomer, which has no
    state yet. ``complete``: whether it holds the complete averages of the next step, so that it can
    finish that one alone. ``parted``: whether its state is a part of the training's, which ranks
    have to put together. ``between``: whether it stands between two steps, where newcomers can
    come in.
    """

    step: int | None = None
    complete: bool = False
    parted: bool = False
    between: bool = False


def agreed_step(reports: Mapping[int, Report]) -> int | None:
    """The number of steps that every rank has finished before the next view begins; `None` if no
    rank has state.

    A rank that reported one step less finishes the step that it holds complete averages of. The
    step under way counts if every rank can finish it. Otherwise all ranks do it again.

    Raises:
        DisagreementError: A rank is behind, and cannot finish the step that another rank has
            finished.
    """
    standing = {
        rank: (report.step, report.complete)
        for rank, report in reports.items()
        if report.step is not None
    }
    if not standing:
        return None
    most = max(step for step, _ in standing.values())
    behind = {rank: report for rank, report in standing.items() if report[0] < most}
    lost = sorted(
        rank for rank, (step, complete) in behind.items() if step != most - 1 or not complete
    )
    if lost:
        found = ", ".join(
            f"{rank}: {step}{' (complete)' * complete}"
            for rank, (step, complete) in standing.items()
        )
        raise DisagreementError(
            f"After an interruption one rank has finished step {most}, and ranks {lost} cannot "
            f"finish it (steps by member: {found}). Every rank has to pass the commit barrier "
            "before it steps its optimizer."
        )
    return most + (not behind and all(complete for _, complete in standing.values()))
