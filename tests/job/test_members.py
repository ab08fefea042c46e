"""Threads that fit a rank's cores, the GPU of each rank, and ranks that share one."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from lightning_ring.errors import RankDiscoveryError
from lightning_ring.job import members as members_module
from lightning_ring.job.job import Job
from lightning_ring.job.members import (
    SHARING,
    JobMember,
    check_gpu_assignment,
    exchange_members,
    fit_threads,
    is_chosen,
    num_threads,
    pick_gpu,
    report_threads,
)
from lightning_ring.job.ranks import SINGLE, RankInfo

EIGHT = JobMember(0, node=0, cores=tuple(range(8)))


def bound(*cores):
    return JobMember(0, node=0, cores=cores)


@pytest.mark.parametrize(
    ("node", "threads"),
    [
        ([EIGHT] * 2, 4),
        ([EIGHT] * 3, 2),
        ([EIGHT] * 16, 1),
        ([replace(EIGHT, quota=4.0)] * 2, 2),
        ([replace(EIGHT, quota=0.5)] * 2, 1),
        ([bound(0, 1), bound(2, 3)], 2),  # of its own cores a rank takes all
        ([bound(0, 1, 2, 3), bound(2, 3, 4, 5)], 3),
        ([bound(0), bound(1, 2, 3)], 1),
    ],
)
def test_a_rank_takes_its_share(node, threads):
    assert num_threads(node[0], node) == threads


def test_what_the_user_chose_is_left_alone(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert not any(is_chosen(threads, 8) for threads in (4, 8, 32, 64))
    assert is_chosen(3, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert is_chosen(8, 8)


@pytest.mark.parametrize(
    ("node", "threads", "level", "text"),
    [
        ([EIGHT] * 2, 4, "INFO", "2 ranks on this node, 8 cores: 4 thread"),
        ([bound(0), bound(1)], 1, "WARNING", "to 1 of its 8 cores, for 1 .*--bind-to none.*PE=4"),
        ([bound(0, 1, 2, 3), bound(4, 5, 6, 7)], 8, "WARNING", "to 4 of its 8 cores, for 8 thread"),
        ([bound(0, 1, 2, 3), bound(4, 5, 6, 7)], 4, "INFO", "2 ranks on this node, 8 cores"),
        ([EIGHT] * 4, 8, "WARNING", "4 ranks with 8 threads .* the 8 core.*OMP_NUM_THREADS=2"),
    ],
)
def test_it_is_said_once(caplog, monkeypatch, node, threads, level, text):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    caplog.set_level("INFO", logger="lightning_ring")
    report_threads(node, threads, chosen=False, log_fit=True)
    (record,) = caplog.records
    assert record.levelname == level
    assert re.search(text, record.getMessage())


def test_ranks_of_two_nodes_fit_their_own_node(monkeypatch):
    set_to = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    members = [JobMember(rank, node=rank // 2, cores=tuple(range(12))) for rank in range(3)]
    for rank in range(3):
        info = RankInfo(rank, 3, min(rank, 1), 2 - rank // 2, rank // 2, 2, "torchrun")
        fit_threads(info, members)
    assert set_to == [6, 6]  # the rank that has its node to itself keeps all 12


def test_pick_gpu(monkeypatch):
    monkeypatch.delenv(SHARING, raising=False)
    assert pick_gpu(local_rank=1, local_size=2, device_count=4) == 1
    # the launcher gave each rank its own, or a cgroup hides the others
    assert pick_gpu(local_rank=1, local_size=2, device_count=1) == 0
    with pytest.raises(RankDiscoveryError, match=r"Local rank 2 .* finds 2 GPUs"):
        pick_gpu(local_rank=2, local_size=4, device_count=2)
    monkeypatch.setenv(SHARING, "1")
    assert pick_gpu(local_rank=3, local_size=4, device_count=2) == 1
    with pytest.raises(RankDiscoveryError, match="finds 0 GPUs"):
        pick_gpu(local_rank=1, local_size=2, device_count=0)


@pytest.mark.parametrize(
    ("nccl", "shared", "choice"),
    [
        ((2, 30, 7), "0", "set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks"),
        ((2, 27, 5), "0", "takes NCCL 2.30 or newer .here: 2.27.5., and NCCL_MULTI_RANK_GPU_EN"),
        ((2, 27, 5), "1", "is set, but takes NCCL 2.30 .* 2.27.5.: install a newer torch"),
        ((), "1", "not in this torch"),
        ((2, 30), "1", None),
    ],
)
def test_two_ranks_on_one_gpu_are_named_with_the_choice(monkeypatch, nccl, shared, choice):
    monkeypatch.setenv(SHARING, shared)
    gpus = [("a", "GPU-1"), ("a", "GPU-2"), ("b", "GPU-1"), ("a", "GPU-2")]
    members = [replace(EIGHT, host=host, gpu=gpu) for host, gpu in gpus]
    check_gpu_assignment(members[:3], nccl)
    named = rf"(?s)Ranks 1 and 3 were given the same GPU, GPU-2 on a.*{choice}"
    with pytest.raises(RankDiscoveryError, match=named) if choice else nullcontext():
        check_gpu_assignment(members, nccl)


@pytest.mark.parametrize(("device", "order"), [("cuda", "1"), ("cpu", None)])
def test_nccl_runs_its_communicators_kernels_in_the_order_of_the_calls(monkeypatch, device, order):
    """Ours and WORLD's are in flight in one backward."""
    name = "NCCL_LAUNCH_ORDER_IMPLICIT"
    monkeypatch.delenv(name, raising=False)
    seen = []
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, **kwargs: seen.append(os.environ.get(name))
    )
    job = Job(SINGLE, [], dist.HashStore(), device=torch.device(device))
    job.open_default_group()
    monkeypatch.setenv(name, "0")  # what the user has set holds
    job.open_default_group()
    assert seen == [order, "0"]


def test_members_are_exchanged_with_two_requests_a_rank(monkeypatch):
    monkeypatch.setattr(members_module, "PrefixStore", lambda prefix, store: store)
    store = Mock(wraps=dist.HashStore())
    own = [JobMember(rank, rank // 4, f"host{rank // 4}", (rank,), 2.0) for rank in range(16)]
    infos = [replace(SINGLE, rank=rank, world_size=16) for rank in range(16)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda info: exchange_members(own[info.rank], info, store), infos))
    assert all(members == own for members in found)
    assert len(store.method_calls) == 2 * 16 + 2  # rank 0 reads all, and writes them into one value
