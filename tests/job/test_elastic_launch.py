"""Which launchers an elastic strategy takes, and the line that its error names for the others."""

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.job.launchers import launcher_variables, started_by_steward
from tests.job.test_launchers import BATCH_SHELL, OPEN_MPI, RINGRUN, SRUN_STEP, TORCHRUN

STEWARD = RINGRUN | {"RING_STEWARD": "127.0.0.1:5"}


def test_a_steward_within_another_launchers_job_is_the_nearest():
    assert not started_by_steward({})
    assert not started_by_steward(BATCH_SHELL)
    assert started_by_steward(STEWARD | OPEN_MPI)
    found = launcher_variables(STEWARD | OPEN_MPI | SRUN_STEP | {"PMIX_RANK": "2"})
    assert (found.source, found.rank, found.world_size) == ("ringrun", 1, 2)


@pytest.mark.parametrize(
    ("environ", "begin", "line"),
    [
        (
            OPEN_MPI,
            "Open MPI started these 4 ranks and ends all",
            "`ringrun -n 4 --min-ranks 1 python train.py`",
        ),
        (
            TORCHRUN,
            "torchrun started these 4",
            "`ringrun -H host1:2,host2:2,... --min-ranks 1 python train.py`",
        ),
        (
            SRUN_STEP,
            "srun started these 3",
            "`ringrun --min-ranks 1 python train.py` in the batch script, without srun",
        ),
        (
            RINGRUN,
            "ringrun started these 2 ranks without --min-ranks",
            "`ringrun -n 2 --min-ranks 1 python train.py`",
        ),
    ],
)
def test_others_are_refused_with_the_line_to_use(environ, begin, line):
    with pytest.raises(ConfigurationError) as refused:
        started_by_steward(environ)
    assert begin in str(refused.value)
    assert line in str(refused.value)
