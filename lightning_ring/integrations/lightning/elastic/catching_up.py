"""A process that joins a fit gets the state of a rank before, while all ranks train on."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lightning_ring.elastic.catch_up.source import Source
from lightning_ring.elastic.catch_up.stream import Stream
from lightning_ring.membership.member import Member

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

ATTEMPTS = 3  # with another rank each, where one dies
_LOOK_SECONDS = 0.02

_log = logging.getLogger("lightning_ring")


class CatchingUp:
    """Both sides of it, in each process of a fit.

    Attributes:
        source: Sends the state of this rank.
        refusal: Why a process of this fit gets nothing before it joins.
    """

    def __init__(self, strategy: ElasticStrategy, refusal: str) -> None:
        self.source = Source(lambda: strategy.fit_model, lambda: strategy.optimizers)
        self._strategy = strategy
        self._stream: Stream | None = None
        self.refuse(refusal)

    def refuse(self, why: str) -> None:
        self.source.refusal = self.refusal = why

    def serve(self, member: Member) -> None:
        """Send the state to processes that ask ``member`` for it."""
        member.on_wanted = lambda message: self.source.feed(
            message["member"], message["address"], message["port"], message["token"]
        )

    @property
    def has_state(self) -> bool:
        """Whether this process has got any."""
        return self._stream is not None and self._stream.step >= 0

    def run(self, member: Member) -> None:
        """Come as far as the ranks that train, or as far as is possible. From then on this process follows them.

        Raises:
            JobEnded: The training is over.
        """
        if self.refusal:
            _log.info("lightning_ring: this process gets its state while all others wait: %s", self.refusal)
            return
        for attempt in range(ATTEMPTS):
            try:
                stream = self._stream = Stream(member.address, self._strategy.fit_model, self._strategy.optimizers)
            except OSError as error:
                _log.warning("lightning_ring: this process gets its state while all others wait: %s", error)
                return
            stream.start()
            member.ask_for_state(stream.port, stream.token, attempt)
            while not stream.complete.is_set() and not stream.over.wait(_LOOK_SECONDS):
                member.check()
                if member.is_needed:
                    return
            if stream.complete.is_set() or stream.refusal:
                return
            stream.close()

    def finish(self, step: int, member: Member) -> None:
        """Take the last steps, where all other ranks wait for this one after ``step`` steps."""
        if self._stream is not None:
            self._stream.reach(step, member.check)
            self._stream.close()

    def close(self) -> None:
        self.source.close("the fit is over")
        if self._stream is not None:
            self._stream.close()
