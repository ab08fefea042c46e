"""`RingMonitor` on real ranks, one launch a world size, and what its failures do to a training."""

import pytest

from tests.battery import check_names

MODULE, FAILURES = "tests.checks.monitor", "tests.checks.monitor_failures"
SECONDS = 150
BY_WORLD_SIZE = tuple(check_names(MODULE, "by_world_size"))
ON_ONE_RANK = tuple(check_names(FAILURES, "on_one_rank"))
ON_TWO_RANKS = tuple(name for name in check_names(FAILURES) if name not in ON_ONE_RANK)

pytestmark = pytest.mark.timeout(SECONDS + 30)


@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check, timeout=SECONDS)


@pytest.mark.parametrize("check", BY_WORLD_SIZE)
@pytest.mark.parametrize("world_size", [1, 3])
def test_on_other_numbers_of_ranks(battery, world_size, check):
    battery(MODULE, world_size, check, timeout=SECONDS, only=BY_WORLD_SIZE)


@pytest.mark.parametrize("check", ON_TWO_RANKS)
def test_failures_on_two_ranks(battery, check):
    battery(FAILURES, 2, check, timeout=SECONDS, only=ON_TWO_RANKS)


@pytest.mark.parametrize("check", ON_ONE_RANK)
def test_failures_on_one_rank(battery, check):
    battery(FAILURES, 1, check, timeout=SECONDS, only=ON_ONE_RANK)
