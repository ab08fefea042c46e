"""Every compressor on real ranks, one launch a world size and backend."""

from __future__ import annotations

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import PowerSGD
from tests.battery import Battery, check_names

MODULE = "tests.checks.compression"


@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize(("world_size", "backend"), [(1, "gloo"), (2, "mpi"), (3, "mpi"), (4, "gloo")])
def test_compression(battery: Battery, world_size: int, backend: str, check: str) -> None:
    battery(MODULE, world_size, check, RING_CHECK_BACKEND=backend)


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"start_iter": -1}, {"min_compression": 0.5}])
def test_powersgd_refuses_what_cannot_work(arguments: dict) -> None:
    with pytest.raises(ConfigurationError, match="PowerSGD got"):
        PowerSGD(**arguments)
