"""The GPU of each rank, and ranks that share one."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job.gpus import check_gpu_assignment, pick_gpu
from lightning_ring.job.job import Job
from lightning_ring.job.ranks import SINGLE

SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
OWN = [("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1")]
TWICE = [*OWN, ("a", "GPU-2")]


def test_pick_gpu():
    assert pick_gpu(local_rank=1, local_size=2, device_count=4, visible=None) == 1
    # the launcher gave each rank its own
    assert pick_gpu(local_rank=1, local_size=2, device_count=1, visible="3") == 0
    # hidden by a cgroup
    assert pick_gpu(local_rank=1, local_size=2, device_count=1, visible=None) == 0
    for visible in (None, "0,1"):
        with pytest.raises(RankDiscoveryError, match=r"Local rank 2 .* finds 2 GPUs"):
            pick_gpu(local_rank=2, local_size=4, device_count=2, visible=visible, environ={})
    assert pick_gpu(local_rank=3, local_size=4, device_count=2, visible=None, environ=SHARED) == 1
    with pytest.raises(RankDiscoveryError, match="finds 0 GPUs"):
        pick_gpu(local_rank=1, local_size=2, device_count=0, visible=None, environ=SHARED)


@pytest.mark.parametrize(
    ("nccl", "environ", "choice"),
    [
        ((2, 30, 7), {}, "set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks"),
        (
            (2, 27, 5),
            {},
            "takes NCCL 2.30 or newer .here: 2.27.5., and NCCL_MULTI_RANK_GPU_ENABLE=1",
        ),
        (
            (2, 27, 5),
            SHARED,
            "is set, but takes NCCL 2.30 or newer .here: 2.27.5.: install a newer torch",
        ),
        ((), SHARED, "not in this torch"),
    ],
)
def test_two_ranks_on_one_gpu_are_named_with_the_choice(nccl, environ, choice):
    check_gpu_assignment(OWN, nccl, environ)
    with pytest.raises(
        RankDiscoveryError, match="Ranks 1 and 3 were given the same GPU, GPU-2 on a"
    ) as caught:
        check_gpu_assignment(TWICE, nccl, environ)
    assert caught.match(choice)


def test_two_ranks_share_a_gpu_where_nccl_can_and_the_user_wants_it():
    check_gpu_assignment(TWICE, (2, 30), SHARED)


@pytest.mark.parametrize(("device", "order"), [("cuda", "1"), ("cpu", None)])
def test_nccl_runs_its_communicators_kernels_in_the_order_of_the_calls(monkeypatch, device, order):
    """Ours and WORLD's are in flight in one backward."""
    monkeypatch.delenv("NCCL_LAUNCH_ORDER_IMPLICIT", raising=False)
    seen = []
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *args, **kwargs: seen.append(os.environ.get("NCCL_LAUNCH_ORDER_IMPLICIT")),
    )
    Job(SINGLE, [], dist.HashStore(), device=torch.device(device)).open_default_group()
    assert seen == [order]
    monkeypatch.setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0")  # what the user has set holds
    Job(SINGLE, [], dist.HashStore(), device=torch.device(device)).open_default_group()
    assert seen == [order, "0"]
