"""The reducer on real ranks, one launch a world size and backend."""

from __future__ import annotations

import pytest

from tests.battery import Battery, check_names

MODULE = "tests.checks.gradients"


@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize(("world_size", "backend"), [(2, "shared memory"), (3, "gloo")])
def test_reducer(battery: Battery, world_size: int, backend: str, check: str) -> None:
    battery(MODULE, world_size, check, RING_CHECK_BACKEND=backend)
