import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import reason_not_to_start, slurm_cluster


@pytest.fixture(scope="session")
def cluster():
    """Two nodes of four cores each on this machine, started once a session."""
    if (reason := reason_not_to_start()) is not None:
        pytest.skip(reason)
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        slurm_cluster(Path(folder)) as cluster,
    ):
        yield cluster
