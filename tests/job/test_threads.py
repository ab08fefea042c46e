"""Threads that fit the cores: ranks that share them, ranks that are bound to some, containers
with a quota.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from lightning_ring.job.members import JobMember
from lightning_ring.job.ranks import RankInfo
from lightning_ring.job.threads import fit_threads, is_chosen, num_threads, report

EIGHT = JobMember(0, node=0, cores=tuple(range(8)))


def bound(*cores: int) -> JobMember:
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
        ([bound(0), bound(1)], 1),
        ([bound(0, 1, 2, 3), bound(2, 3, 4, 5)], 3),
        ([bound(0), bound(1, 2, 3)], 1),
    ],
)
def test_a_rank_takes_its_share(node, threads):
    assert num_threads(node[0], node) == threads


def test_what_the_user_chose_is_left_alone(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("lightning_ring.job.threads.two_a_core", lambda: False)
    assert is_chosen(4, 8, {})
    monkeypatch.setattr("lightning_ring.job.threads.two_a_core", lambda: True)
    assert not is_chosen(8, 8, {})
    assert not is_chosen(4, 8, {})
    assert not is_chosen(64, 8, {})
    assert is_chosen(3, 8, {})
    assert is_chosen(8, 8, {"OMP_NUM_THREADS": "8"})


@pytest.mark.parametrize(
    ("node", "threads", "level", "text"),
    [
        ([EIGHT] * 2, 4, "INFO", "2 ranks on this node, 8 cores: 4 thread"),
        (
            [bound(0), bound(1)],
            1,
            "WARNING",
            "to 1 of its 8 cores, for 1 thread.*--bind-to none.*PE=4",
        ),
        ([bound(0, 1, 2, 3), bound(4, 5, 6, 7)], 8, "WARNING", "to 4 of its 8 cores, for 8 thread"),
        ([bound(0, 1, 2, 3), bound(4, 5, 6, 7)], 4, "INFO", "2 ranks on this node, 8 cores"),
        (
            [EIGHT] * 4,
            8,
            "WARNING",
            "4 ranks with 8 threads each share the 8 core.*OMP_NUM_THREADS=2",
        ),
    ],
)
def test_it_is_said_once(caplog, monkeypatch, node, threads, level, text):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    caplog.set_level("INFO", logger="lightning_ring")
    report(node, threads, chosen=False, log_fit=True)
    (record,) = caplog.records
    assert record.levelname == level
    assert re.search(text, record.getMessage())


def test_ranks_of_two_nodes_fit_their_own_node(monkeypatch):
    set_to: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    members = [JobMember(rank, node=rank // 2, cores=tuple(range(12))) for rank in range(3)]
    for rank in range(3):
        fit_threads(
            RankInfo(rank, 3, min(rank, 1), 2 - rank // 2, rank // 2, 2, "torchrun"), members
        )
    assert set_to == [6, 6]  # the rank that has its node to itself keeps all 12
