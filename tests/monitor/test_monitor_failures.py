"""What a failing `RingMonitor` does to a training, on real ranks."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.monitor_failures"
SECONDS = 150
ON_ONE_RANK = tuple(check_names(MODULE, "on_one_rank"))
ON_TWO_RANKS = tuple(name for name in check_names(MODULE) if name not in ON_ONE_RANK)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", ON_TWO_RANKS)
def test_on_two_ranks(battery: Battery, check: str) -> None:
    battery(MODULE, 2, check, timeout=SECONDS, only=ON_TWO_RANKS)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", ON_ONE_RANK)
def test_on_one_rank(battery: Battery, check: str) -> None:
    battery(MODULE, 1, check, timeout=SECONDS, only=ON_ONE_RANK)
