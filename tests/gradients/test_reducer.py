"""The reducer on real ranks, one launch a world size and backend."""

import pytest

from tests.battery import check_names

MODULE = "tests.checks.gradients"


@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize(("world_size", "backend"), [(2, "shared memory"), (3, "gloo")])
def test_reducer(battery, world_size, backend, check):
    battery(MODULE, world_size, check, RING_CHECK_BACKEND=backend)
