"""A process that has caught up takes the memory of its join, before the others wait for it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.host.malloc import LARGEST_KEPT
from lightning_ring.integrations.lightning.elastic import catching_up
from lightning_ring.integrations.lightning.elastic.catching_up import CatchingUp


class Stream:
    """All has come from three ranks."""

    port, token, refusal, num_senders = 1, "", "", 3

    def __init__(self, *_: Any) -> None:
        self.complete = threading.Event()
        self.complete.set()
        self.over = threading.Event()

    def start(self) -> None: ...

    def count_bytes(self, largest: int) -> tuple[int, int]:
        assert largest == LARGEST_KEPT
        return 1000, 2000


@pytest.mark.parametrize(
    ("algorithm", "keeps", "taken"),
    [
        (Sharded, True, [2 * 1000 + (3 * 1000 + 2 * 2000) // 4]),
        (Averaging, True, [1000]),
        (Sharded, False, []),
    ],
)
def test_memory_is_taken_before_the_join(
    algorithm: type, keeps: bool, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setattr(catching_up, "StateStream", Stream)
    monkeypatch.setattr(catching_up, "take_memory", found.append)
    strategy: Any = SimpleNamespace(
        fit_model=None,
        optimizers=[],
        keeps_freed_memory=keeps,
        survivor=algorithm(),
    )
    recovery: Any = SimpleNamespace(parted=algorithm.sharded)
    member: Any = SimpleNamespace(
        address="", is_needed=False, check=lambda: None, ask_for_state=lambda *_, **__: None
    )
    CatchingUp(strategy, recovery, "").run(member)
    assert found == taken
