"""`RingStrategy` on real ranks, one launch a world size."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.strategy"
SECONDS = 400
# three and four ranks share two cores in the smallest machine
BY_WORLD_SIZE = tuple(check_names(MODULE, "by_world_size"))


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize("world_size", [1, 2])
def test_strategy(battery: Battery, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check, timeout=SECONDS)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", BY_WORLD_SIZE)
@pytest.mark.parametrize("world_size", [3, 4])
def test_strategy_on_more_ranks(battery: Battery, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check, timeout=SECONDS, only=BY_WORLD_SIZE)
