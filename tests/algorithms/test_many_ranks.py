"""More ranks than cores train right: 8 on two nodes, 16 on four. How fast is another question."""

import pytest

from tests.battery import check_names
from tests.integrations.lightning.elastic import test_fit


@pytest.mark.parametrize("world_size", [8, 16])
@pytest.mark.parametrize("check", check_names("tests.checks.many_ranks"))
def test_many_ranks_equal_one_process(battery, world_size, check):
    battery("tests.checks.many_ranks", world_size, check, OMPI_MCA_mpi_yield_when_idle="1")


@pytest.mark.ranks
@pytest.mark.timeout(150)
def test_eight_ranks_outlive_four_deaths_at_once(tmp_path):
    deaths = [f"{number}:2:backward" for number in (0, 2, 5, 7)]
    ends = test_fit.fit(tmp_path, "auto", *deaths, ranks=8)
    test_fit.check(tmp_path, ends, 4)
