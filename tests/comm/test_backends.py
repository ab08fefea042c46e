"""The same checks over Gloo and over MPI, on real ranks."""

import pytest

from tests.battery import check_names


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("check", check_names("tests.checks.comm"))
def test_backends(battery, world_size, check):
    battery("tests.checks.comm", world_size, check, OMPI_MCA_mpi_yield_when_idle="1")
