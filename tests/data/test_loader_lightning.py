"""Samplers and loaders under Lightning: one launch of two ranks, `tests/checks/loader.py`."""

import pytest

from tests.battery import check_names

MODULE = "tests.checks.loader"


@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check)
