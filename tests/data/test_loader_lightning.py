"""Samplers and loaders under Lightning: one launch of two ranks, `tests/checks/loader.py`."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.loader"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery: Battery, check: str) -> None:
    battery(MODULE, 2, check)
