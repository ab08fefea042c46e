"""``ring_sharded`` on real ranks, one launch a world size."""

import pytest

from tests.battery import check_names

MODULE = "tests.checks.sharded"
SECONDS = 240
BY_WORLD_SIZE = tuple(check_names(MODULE, "by_world_size"))


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", check_names(MODULE))
def test_sharded(battery, check):
    battery(MODULE, 2, check, timeout=SECONDS)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", BY_WORLD_SIZE)
def test_sharded_on_three_ranks(battery, check):
    battery(MODULE, 3, check, timeout=SECONDS, only=BY_WORLD_SIZE)
