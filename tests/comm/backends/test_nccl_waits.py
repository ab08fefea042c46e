"""The host waits for a GPU with the patience of the CPU's transports: failed and late ranks end
a read.
"""

import logging
import threading
import time
from datetime import timedelta

import pytest
import torch

from lightning_ring.errors import CollectiveError, PeerFailedError
from tests.fake_device import on_fake_device
from tests.thread_ranks import run_ranks


@pytest.fixture
def late(monkeypatch):
    """A GPU that comes to nothing before it is set."""
    event = threading.Event()
    on_fake_device(monkeypatch, lambda: event.is_set)
    return event


def test_a_value_is_read_once_the_gpu_has_it(open_nccl, late):

    def rank(comm):
        ours = open_nccl(comm)
        flag = torch.ones(1)
        copy = ours.copy_to_host(flag)
        flag.zero_()
        assert not copy.ready()
        threading.Timer(0.1, late.set).start()
        return float(copy.value())

    assert run_ranks(2, rank) == [1, 1]


def test_a_failed_rank_ends_the_read(open_nccl, late):

    def rank(comm):
        ours = open_nccl(comm)
        ours._group.late = late
        ours.all_reduce_(torch.ones(8), name="bucket 3")

        def check():
            raise PeerFailedError("rank 1 was killed by signal 9")

        comm.barrier()
        comm._policy.check = check
        began = time.monotonic()
        with pytest.raises(PeerFailedError, match="rank 1 was killed"):
            ours.read(torch.ones(1))
        assert time.monotonic() - began < 30  # of 60
        with pytest.raises(PeerFailedError):
            ours.all_reduce_(torch.ones(8))

    run_ranks(2, rank)


def test_a_late_collective_is_reported_and_ends_by_name(open_nccl, late, caplog):

    def rank(comm):
        comm._policy.stall_warning = timedelta(seconds=0.1)
        ours = open_nccl(comm)
        ours.all_reduce_(torch.ones(8), name="bucket 2")
        ours._group.late = late
        ours.all_reduce_(torch.ones(8), name="bucket 3")
        comm._policy.timeout = timedelta(seconds=0.5)
        with pytest.raises(
            CollectiveError, match=r'all_reduce "bucket 3".* did not finish within 0.5 s'
        ):
            ours.read(torch.ones(1))

    with caplog.at_level(logging.WARNING, "lightning_ring"):
        run_ranks(1, rank)
    assert caplog.text.count('all_reduce "bucket 3" (sum, float32, 8 elements) has waited') == 1


def test_a_gpu_that_computes_is_waited_for(open_nccl, late):
    """No collective is open: neither timeout nor warning applies."""

    def rank(comm):
        ours = open_nccl(comm)
        ours.all_reduce_(torch.ones(8))
        comm._policy.timeout = timedelta(seconds=0.1)
        threading.Timer(0.4, late.set).start()
        return float(ours.read(torch.ones(1)))

    assert run_ranks(1, rank) == [1]


def test_diverged_calls_are_compared_on_request(open_nccl):
    errors = []

    def rank(comm):
        ours = open_nccl(comm, checked=True)
        ours.all_reduce_(torch.ones(8), name="backward 1: bucket 0").wait()
        with pytest.raises(CollectiveError) as caught:
            ours.all_reduce_(torch.ones(8), name=f"backward {2 + comm.rank}: bucket 0").wait()
        errors.append(str(caught.value))

    run_ranks(2, rank)
    assert errors[0] == errors[1]
    assert "backward 2: bucket 0" in errors[0]
    assert "backward 3: bucket 0" in errors[0]
