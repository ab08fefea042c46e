"""All strangers at once, at every door of a job: it ends right."""

import pytest

from tests.hosts import why_not
from tests.strangers.jobs import run

HOSTS = pytest.param("hosts", marks=pytest.mark.netns)


@pytest.mark.ranks
@pytest.mark.parametrize("job", ["plain", "horovod", "elastic", HOSTS])
def test_a_job_ends_right_whatever_strangers_do(job, tmp_path):
    if job == "hosts" and (reason := why_not()) is not None:
        pytest.skip(reason)
    run(job, tmp_path)
