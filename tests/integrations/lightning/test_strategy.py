"""`RingStrategy` on real ranks, one launch a world size."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.strategy"
SECONDS = 400


# three and four ranks share two cores in the smallest machine: there, what the number of ranks can change
NUMERIC = tuple(
    name for name in check_names(MODULE) if any(word in name for word in ("equal", "join", "uneven", "sync"))
)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize("world_size", [1, 2])
def test_strategy(battery: Battery, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check, timeout=SECONDS)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", NUMERIC)
@pytest.mark.parametrize("world_size", [3, 4])
def test_strategy_on_more_ranks(battery: Battery, world_size: int, check: str) -> None:
    battery(MODULE, world_size, check, timeout=SECONDS, only=NUMERIC)
