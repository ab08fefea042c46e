"""The end of a generation over NCCL: a rank inside the driver goes on although a peer has died."""

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from lightning_ring.comm.backends import nccl
from lightning_ring.elastic import generations
from lightning_ring.elastic.generations import Generations
from lightning_ring.errors import PeerFailedError
from tests.comm.backends.fake_nccl import FakeGroup, over_fake_nccl
from tests.thread_ranks import run_ranks

MINUTE = timedelta(seconds=60)
DIED = PeerFailedError("rank 1 was killed by signal 9")


def with_a_generation(monkeypatch, then):
    """``then(communicator, generations, default_group)`` on a rank whose job is over fakes."""
    open_nccl = over_fake_nccl(monkeypatch)

    def rank(comm):
        default = FakeGroup(comm)
        fake = SimpleNamespace(group=SimpleNamespace(WORLD=default), is_initialized=lambda: True)
        monkeypatch.setattr(generations, "dist", fake)
        member = SimpleNamespace()
        made = Generations(member, "nccl", torch.device("cuda:0"), MINUTE, MINUTE)
        ours = open_nccl(comm)
        made.job = SimpleNamespace(policy=comm._policy, communicator=ours)
        return then(ours, made, default)

    return run_ranks(1, rank)[0]


def die_soon(made):
    """The member's thread hears that the generation is over."""
    threading.Timer(0.1, lambda: made._member.on_stop(DIED)).start()


@pytest.mark.parametrize("which", ["gradients", "default"])
def test_the_driver_s_wait_ends_when_a_peer_has_died(monkeypatch, which):
    """``loss.item()`` waits behind a kernel that ends only once every rank takes part."""

    def then(ours, made, default):
        group = ours._group if which == "gradients" else default
        group.late = threading.Event()
        ours.all_reduce_(torch.ones(8), name="bucket 3")
        die_soon(made)
        assert group.late.wait(5), "the host is still inside the driver"
        with pytest.raises(PeerFailedError, match="rank 1 was killed"):
            ours.all_reduce_(torch.ones(8))

    with_a_generation(monkeypatch, then)


def test_one_group_s_end_does_not_wait_for_the_other_s(monkeypatch):
    """NCCL frees memory when it aborts, and that waits for kernels of other groups, too."""

    def then(ours, made, default):
        both = threading.Barrier(2)
        ended = []

        def abort():
            both.wait(5)
            ended.append(True)

        ours._group.abort = default.abort = abort
        die_soon(made)
        until = threading.Event()
        while len(ended) < 2 and not both.broken:
            until.wait(0.01)
        return len(ended) == 2

    assert with_a_generation(monkeypatch, then)


def test_a_value_after_an_aborted_collective_is_not_taken(monkeypatch):
    """The kernels have ended, so the event is reached; what they leave is no average."""

    def then(ours, made, default):
        ours._group.late = late = threading.Event()
        ours.all_reduce_(torch.ones(8), name="bucket 3")
        die_soon(made)
        assert late.wait(5)
        with pytest.raises(PeerFailedError):
            ours.wait_until(late.is_set)

    with_a_generation(monkeypatch, then)


def test_a_group_is_not_aborted_while_a_collective_is_launched(monkeypatch):
    """NCCL would free the communicator under the launch."""

    def then(ours, made, default):
        interrupting = threading.Thread(target=ours.interrupt, daemon=True)

        def launch(*args, **kwargs):
            interrupting.start()
            interrupting.join(0.2)
            assert ours._group.calls == []
            return SimpleNamespace(wait=lambda: True, is_completed=lambda: True)

        monkeypatch.setattr(nccl.dist, "all_reduce", launch)
        ours.all_reduce_(torch.ones(8))
        interrupting.join(5)
        assert ours._group.calls == [("abort", None)]

    with_a_generation(monkeypatch, then)
