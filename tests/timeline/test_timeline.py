"""The timeline in real fits, on real ranks."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.timeline"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_timeline(battery: Battery, check: str) -> None:
    battery(MODULE, 2, check)
