"""`RingStrategy` on real ranks, one launch a world size."""

import pytest

from tests.battery import check_names

MODULE = "tests.checks.strategy"
SECONDS = 400
BY_WORLD_SIZE = tuple(check_names(MODULE, "by_world_size"))
ON_ONE_RANK = tuple(check_names(MODULE, "on_one_rank"))
CHECKS = {  # by world size; four ranks are three again, but for the ring itself (`tests/comm`)
    1: ON_ONE_RANK,
    2: tuple(check for check in check_names(MODULE) if check not in ON_ONE_RANK),
    3: BY_WORLD_SIZE,
}
CASES = [(world_size, check) for world_size, checks in CHECKS.items() for check in checks]


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize(("world_size", "check"), CASES)
def test_strategy(battery, world_size, check):
    battery(MODULE, world_size, check, timeout=SECONDS, only=CHECKS[world_size])
