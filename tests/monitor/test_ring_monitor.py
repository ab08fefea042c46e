"""`RingMonitor` on real ranks, one launch a world size."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.monitor"
SECONDS = 150
BY_WORLD_SIZE = tuple(check_names(MODULE, "by_world_size"))


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery: Battery, check: str) -> None:
    battery(MODULE, 2, check, timeout=SECONDS)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", BY_WORLD_SIZE)
@pytest.mark.parametrize("world_size", [1, 3])
def test_on_other_numbers_of_ranks(battery: Battery, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check, timeout=SECONDS, only=BY_WORLD_SIZE)
