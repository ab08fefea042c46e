"""The limit of open files is raised where allowed, and else an error before the job starts."""

import resource
from multiprocessing import get_context

import pytest

from lightning_ring.errors import ConfigurationError
from lightning_ring.host import require_open_files


def try_limits():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
    require_open_files(200, "rank 0 of 50")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (256, 1024)
    require_open_files(900, "rank 0 of 200")
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (900, 1024)
    found = r"rank 0 of 4,096 needs 16,512 open files, .* and may have 1,024\. .*`ulimit -n 65536`"
    with pytest.raises(ConfigurationError, match=found):
        require_open_files(16_512, "rank 0 of 4,096")


def test_the_soft_limit_is_raised_and_a_lower_hard_one_is_an_error():
    process = get_context("fork").Process(target=try_limits)  # the limit does not come back
    process.start()
    process.join(60)
    assert process.exitcode == 0
