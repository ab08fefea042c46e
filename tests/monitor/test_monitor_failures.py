"""What a failing `RingMonitor` does to a training, on real ranks."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.monitor_failures"
SECONDS = 150
ALONE = tuple(name for name in check_names(MODULE) if "alone" in name)
TOGETHER = tuple(name for name in check_names(MODULE) if name not in ALONE)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", TOGETHER)
def test_on_two_ranks(battery: Battery, check: str) -> None:
    battery(MODULE, 2, check, timeout=SECONDS, only=TOGETHER)


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("check", ALONE)
def test_on_one_rank(battery: Battery, check: str) -> None:
    battery(MODULE, 1, check, timeout=SECONDS, only=ALONE)
