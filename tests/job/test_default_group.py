"""torch.distributed's default group, opened again after an attempt that failed."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_ring.comm.backends.shared_memory.kept import KeptMemory
from lightning_ring.comm.waiting import WaitPolicy
from lightning_ring.errors import PeerFailedError
from lightning_ring.job.job import Job, Lasting
from lightning_ring.job.ranks import RankInfo


def test_an_attempt_that_failed_does_not_rename_the_next_group() -> None:
    """Ranks whose attempts failed a different number of times would look for each other under
    different names.
    """
    lasting = Lasting(lambda: None, KeptMemory(), timedelta(seconds=0.2))
    alone = Job(RankInfo(0, 2, 0, 2, 0, 1, "ringrun"), [], dist.HashStore(), lasting=lasting)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            alone.open_default_group()  # the other rank never comes
    assert not dist.is_initialized()
    Job(
        RankInfo(0, 1, 0, 1, 0, 1, "ringrun"), [], dist.HashStore(), lasting=lasting
    ).open_default_group()
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("broken", [False, True])
def test_on_gpus_a_fit_after_a_broken_one_has_a_default_group_of_its_own(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of SyncBatchNorm may wait on its stream for a rank that never comes."""
    aborted: list[object] = []

    def abort() -> None:
        aborted.append(dist.group.WORLD)
        dist.destroy_process_group()

    monkeypatch.setattr("lightning_ring.job.job.is_gpu", lambda device: True)
    monkeypatch.setattr("lightning_ring.job.job._abort_process_group", abort)
    job = Job(RankInfo(0, 1, 0, 1, 0, 1, "ringrun"), [], dist.HashStore())
    job.open_default_group()
    try:
        before = dist.group.WORLD
        job.policy = WaitPolicy(timedelta(seconds=9))
        if broken:
            job.policy.fail(PeerFailedError("rank 1 is gone"))
        job.start_fit()
        assert (dist.group.WORLD is not before) == broken
        assert aborted == [before] * broken
    finally:
        dist.destroy_process_group()
