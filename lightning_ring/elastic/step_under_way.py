"""The step that this rank has begun and not finished, which may have to be taken back."""

from __future__ import annotations

from collections.abc import Callable


class StepUnderWay:
    """Holds what restores the state before the step, until the step is finished or taken back."""

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None

    def begin(self, undo: Callable[[], None]) -> None:
        """``undo`` restores what gradients, forward and log change. It is called once at most."""
        self._undo = undo

    def finish(self) -> None:
        self._undo = None

    def take_back(self) -> None:
        """Restore the state before the step, if one is under way."""
        undo, self._undo = self._undo, None
        if undo is not None:
            undo()
