"""A rank that waits leaves the cores to those that compute."""

import pytest

from tests.battery import check_names


@pytest.mark.parametrize("check", check_names("tests.checks.waiting"))
def test_waiting(battery, check):
    battery("tests.checks.waiting", 2, check, OMPI_MCA_mpi_yield_when_idle="1")
