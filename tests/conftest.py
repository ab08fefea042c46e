import gc
import os
import shutil
import signal
import sys
import tempfile
from unittest.mock import patch

import pytest

from tests import forked, processes
from tests.battery import Battery
from tests.hosts import open_hosts, why_not
from tests.processes import SEGMENTS

# Files that take 12 seconds or more, the longest first. With xdist they begin, so that none of them
# is left to the end.
LONG = (
    "integrations/lightning/elastic/test_fit.py",
    "slurm/test_slurm.py",
    "optim/test_triton.py",
    "test_benchmarks.py",
    "comm/test_backends.py",
    "integrations/lightning/test_strategy.py",
    "job/test_link.py",
    "job/test_jobs.py",
    "recipes/test_train.py",
    "fuzz/test_fuzz.py",
    "test_release.py",
    "launch/test_remote.py",
    "gradients/test_compression.py",
    "integrations/lightning/test_sharded.py",
    "algorithms/test_many_ranks.py",
    "integrations/lightning/test_jobs.py",
    "tools/plan/test_recorded.py",
    "tools/doctor/test_doctor.py",
    "tools/doctor/test_hosts.py",
    "strangers/test_strangers.py",
    "chaos/test_chaos.py",
    "gradients/test_kernels.py",
    "job/test_stalls.py",
    "recipes/test_start.py",
    "launch/test_job_ends.py",
    "launch/test_elastic.py",
    "integrations/lightning/elastic/test_ends.py",
    "recipes/test_configs.py",
    "elastic/test_torture.py",
    "comm/backends/test_shared_memory.py",
    "loops/test_plain_loop.py",
    "horovod/test_horovod.py",
    "gradients/test_reducer.py",
    # Without ranks, of 5 s or more.
    "optim/test_battery.py",
    "job/test_watch.py",
    "algorithms/sharded/test_sharding.py",
    "comm/backends/test_thread.py",
)
OWN_SEGMENTS = pytest.StashKey[str]()


def pytest_configure(config):
    """Once a session: xdist's workers, which start later, and pytest within a test inherit the
    folder and the servers.

    The folder is for Open MPI's shared memory. A job whose mpirun is killed leaves files there, and
    so does every process that starts MPI without mpirun, as Lightning's own strategies do to look
    for ranks.
    """
    # A shell starts background jobs, CI's among them, with Ctrl-C ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if SEGMENTS not in os.environ:
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        config.stash[OWN_SEGMENTS] = os.environ[SEGMENTS] = tempfile.mkdtemp(
            prefix="tests-", dir=where
        )
    if forked.ADDRESS not in os.environ:
        forked.start()
    # xdist begins with the files of most tests, not with those of longest ones
    config.option.loadscopereorder = False


def pytest_unconfigure(config):
    forked.close()
    if folder := config.stash.get(OWN_SEGMENTS, ""):
        del os.environ[SEGMENTS]
        shutil.rmtree(folder)


def pytest_collection_modifyitems(items):
    """Tests on the ranks of a battery, of Slurm or of two hosts are marked `ranks` here, all
    others in their files.
    """
    of_long = {str(processes.ROOT / "tests" / name): place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: of_long.get(str(item.path), len(LONG)))
    for item in items:
        if (
            "battery" in item.fixturenames
            or item.get_closest_marker("slurm")
            or item.get_closest_marker("netns")
        ):
            item.add_marker("ranks")


def pytest_collection_finish():
    """What is imported by now stays: garbage collections, some of which tests ask for, need not
    visit it.

    Networks of tests gain nothing from torch's threads, of which each rank that is a thread would
    have its own.
    """
    assert "mpi4py.MPI" not in sys.modules, (
        "a test's file starts MPI in pytest's process: import it in the function"
    )
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _ranks_are_marked(request, monkeypatch):
    """Without the marker `ranks`, `tests.processes` starts nothing."""
    monkeypatch.setattr(
        processes, "may_start", request.node.get_closest_marker("ranks") is not None
    )


@pytest.fixture(scope="session", autouse=True)
def _told_to_end():
    """SIGTERM ends the session as Ctrl-C does: with what tests and fixtures have to clean up."""
    before = signal.signal(
        signal.SIGTERM, lambda number, frame: pytest.exit("SIGTERM", 128 + number)
    )
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(autouse=True)
def _environment_stays():
    """What a test calls may set variables, as `open_store` sets GLOO_SOCKET_IFNAME; later tests'
    ranks inherit them.
    """
    with patch.dict(os.environ):
        yield


@pytest.fixture(autouse=True)
def _no_open_group():
    """A fit leaves torch.distributed's default group to the process, and ranks that meet look
    for one first.
    """
    yield
    dist = sys.modules.get("torch.distributed")  # not imported here, for xdist's controller
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def hosts():
    """Two network namespaces without a limit of their rate. For tests with the mark `netns`."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with open_hosts(2, rate=None) as hosts:
        yield hosts


@pytest.fixture(scope="session")
def battery(tmp_path_factory):
    battery = Battery(tmp_path_factory.mktemp("battery"))
    yield battery
    battery.close()
