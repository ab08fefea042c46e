"""`RingStrategy` on real ranks, one launch a world size."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.strategy"
SECONDS = 400


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_strategy(battery: Battery, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check, timeout=SECONDS)
