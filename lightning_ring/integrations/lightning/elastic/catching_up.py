"""A process that joins a fit gets the state of the ranks before, while they train on."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_ring.algorithms.holdings import Holdings
from lightning_ring.algorithms.sharded.inventory import Inventory
from lightning_ring.elastic.catch_up.source import Source
from lightning_ring.elastic.catch_up.stream import StateStream
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.host.malloc import LARGEST_KEPT, take_memory
from lightning_ring.membership.member import Member

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

ATTEMPTS = 3  # with another rank each, where one dies
# where each rank sends its part, which is another one as soon as ranks die or come
ATTEMPTS_OF_ALL = 10
_LOOK_SECONDS = 0.02

_log = logging.getLogger("lightning_ring")


class CatchingUp:
    """Both sides of it, in each process of a fit.

    Attributes:
        source: Sends the state of this rank.
        refusal: Why a process of this fit gets nothing before it joins.
        parts: What this process has got of sharded state.
    """

    def __init__(self, strategy: ElasticStrategy, recovery: Recovery, refusal: str) -> None:
        self.source = Source(self._holdings)
        self.parts: Inventory | None = None
        self._strategy = strategy
        self._recovery = recovery
        self._stream: StateStream | None = None
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
        """Come as far as the ranks that train, or as far as is possible. From then on this process
        follows them.

        Raises:
            JobEnded: The training is over.
        """
        if self.refusal:
            _log.info(
                "lightning_ring: this process gets its state while all others wait: %s",
                self.refusal,
            )
            return
        of_all = self._recovery.parted
        for attempt in range(ATTEMPTS_OF_ALL if of_all else ATTEMPTS):
            try:
                stream = self._stream = StateStream(
                    member.address, self._strategy.fit_model, self._strategy.optimizers
                )
            except OSError as error:
                _log.warning(
                    "lightning_ring: this process gets its state while all others wait: %s", error
                )
                return
            stream.start()
            member.ask_for_state(stream.port, stream.token, attempt, of_all=of_all)
            while not stream.complete.is_set() and not stream.over.wait(_LOOK_SECONDS):
                member.check()
                if member.is_needed:
                    return
            if stream.complete.is_set():
                self._take_memory(stream)
            if stream.complete.is_set() or stream.refusal:
                return
            self._close_stream()

    def finish(self, step: int, member: Member) -> None:
        """Take the last steps, where all other ranks wait for this one after ``step`` steps."""
        if self._stream is not None:
            self._stream.reach(step, member.check)
            self._close_stream()

    def ranks_change(self) -> None:
        """Before this rank goes on with other ones: where they divide the state, its part will
        be another one.
        """
        if self._recovery.parted:
            self.source.finish_feeds()

    def close(self) -> None:
        self.source.close("the fit is over")
        self._close_stream()

    def _take_memory(self, stream: StateStream) -> None:
        """Have the memory that the join will need: all others would wait while the system gives
        it, page by page.
        """
        strategy = self._strategy
        if strategy.keeps_freed_memory:
            sizes = stream.count_bytes(LARGEST_KEPT)
            take_memory(strategy.survivor.memory_to_join(*sizes, ranks=stream.num_senders + 1))

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self.parts = self._stream.parts

    def _holdings(self) -> Holdings | None:
        strategy, view = self._strategy, self._recovery.view
        held = strategy.survivor.holdings(strategy.fit_model, strategy.optimizers)
        return (
            replace(held, generation=view.generation)
            if held is not None and view is not None
            else None
        )
