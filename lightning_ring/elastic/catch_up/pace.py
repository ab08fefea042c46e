"""Whether a process that catches up comes any further beside the gradients that follow it."""

from __future__ import annotations

import time

# It does not where, over at least so many steps and seconds, less than this part of what was sent
# was state.
STEPS, SECONDS, PART = 10, 5.0, 0.1


class SendingPace:
    """Bytes of state, and of gradients of the state that was sent before, that have gone over one
    connection.

    State goes only where no gradients wait. Where steps are short, gradients may leave no room for
    it, and the more of the state was sent, the more gradients follow it.
    """

    def __init__(self) -> None:
        self._begin()

    def sent(self, nbytes: int, *, is_state: bool) -> None:
        self._bytes += nbytes
        self._state += nbytes * is_state

    def step(self) -> bool:
        """A step was taken. Whether there is no hope left."""
        self._steps += 1
        if self._steps < STEPS or time.monotonic() - self._since < SECONDS:
            return False
        hopeless = self._state < PART * self._bytes
        self._begin()
        return hopeless

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._steps = self._bytes = self._state = 0
