"""The end of a plain loop, where another rank has finished and hung up before the steward's word
of that has come.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.elastic.loop import ElasticLoop
from lightning_ring.errors import PeerFailedError


class Steward:
    """A member and connections: the last barrier fails at once, and the word of the other's end
    comes ``after``.
    """

    def __init__(self, after: float | None) -> None:
        self.training_is_over = self.finished = False
        self.communicator = SimpleNamespace(barrier=self.barrier)
        if after is not None:
            threading.Timer(after, self.learn).start()

    def learn(self) -> None:
        self.training_is_over = True

    def is_over(self, seconds: float) -> bool:
        time.sleep(min(seconds, 0.01))
        return False

    def barrier(self) -> None:
        raise PeerFailedError("connection closed by peer")

    def finish(self) -> None:
        self.finished = True

    def close(self) -> None:
        pass


def test_a_rank_whose_peer_has_finished_finishes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for after, finishes in ((0.1, True), (None, False)):
        monkeypatch.setattr("lightning_ring.elastic.loop.BLAME_SECONDS", 60.0 if finishes else 0.5)
        steward: Any = Steward(after)
        loop = ElasticLoop(steward, steward, Averaging(), nn.Linear(1, 1), [])
        if finishes:
            loop.finish()
        else:
            with pytest.raises(PeerFailedError):
                loop.finish()
        assert steward.finished is finishes
