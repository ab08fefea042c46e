"""torch.distributed's default group, opened again after an attempt that failed."""

from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import PeerFailedError
from lightning_ring.job.job import Job, Lasting
from lightning_ring.job.ranks import SINGLE, RankInfo


def test_an_attempt_that_failed_does_not_rename_the_next_group():
    """Ranks whose attempts failed a different number of times would look for each other under
    different names.
    """
    lasting = Lasting(lambda: None, KeptMemory(), timedelta(seconds=0.2))
    alone = Job(RankInfo(0, 2, 0, 2, 0, 1, "ringrun"), [], dist.HashStore(), lasting=lasting)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            alone.open_default_group()  # the other rank never comes
    assert not dist.is_initialized()
    Job(SINGLE, [], dist.HashStore(), lasting=lasting).open_default_group()
    assert dist.group.WORLD.group_name == "0"


def test_every_backend_of_a_default_group_waits_longer_than_it_opens(monkeypatch):
    """NCCL's watchdog ends a process whose SyncBatchNorm waits for a rank longer than that."""
    backends = {torch.device("cpu"): Mock(), torch.device("cuda"): Mock()}
    fakes = {"is_initialized": False, "is_backend_available": True, "init_process_group": None}
    for name, answer in fakes.items():
        monkeypatch.setattr(dist, name, Mock(return_value=answer))
    group = SimpleNamespace(_device_types=list(backends), _get_backend=backends.get)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=group))
    minutes = timedelta(minutes=5)
    settings = {"device": torch.device("cuda:0"), "timeout": minutes}
    lasting = Lasting(lambda: None, KeptMemory())
    info = RankInfo(0, 2, 0, 2, 0, 1, "ringrun")
    Job(info, [], dist.HashStore(), lasting=lasting, **settings).open_default_group()
    monkeypatch.undo()
    for backend in backends.values():
        backend._set_default_timeout.assert_called_once_with(minutes)


@pytest.mark.parametrize("broken", [False, True])
def test_on_gpus_a_fit_after_a_broken_one_has_a_default_group_of_its_own(broken, monkeypatch):
    """Kernels of SyncBatchNorm may wait on its stream for a rank that never comes."""
    aborted = []

    def abort():
        aborted.append(dist.group.WORLD)
        dist.destroy_process_group()

    monkeypatch.setattr("lightning_ring.job.job.is_gpu", lambda device: True)
    monkeypatch.setattr("lightning_ring.job.job._abort_process_group", abort)
    job = Job(SINGLE, [], dist.HashStore())
    job.open_default_group()
    before = dist.group.WORLD
    job.policy = WaitPolicy(timedelta(seconds=9))
    if broken:
        job.policy.fail(PeerFailedError("rank 1 is gone"))
    job.start_fit()
    assert (dist.group.WORLD is not before) == broken
    assert aborted == [before] * broken
