"""Collectives of several channels are on the wire at a time, do not mix, and fail as those of
one channel do.
"""

import random
import threading

import pytest
import torch

from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.comm.ring_communicator import Channel, ChannelSelector
from lightning_ring.comm.waiting import WaitPolicy
from tests.thread_ranks import ThreadTransport, ThreadWorld, run_ranks

MIB = 2**20


def three_channels():
    channels = [Channel(ThreadTransport(ThreadWorld(2), 0), tag, WaitPolicy()) for tag in (0, 2, 3)]
    return ChannelSelector(channels), channels


def test_large_and_small_ones_in_turn_do_not_put_all_large_ones_on_one_channel():
    channels, each = three_channels()
    large = [channels.next(9 * MIB if number % 2 == 0 else 1000) for number in range(12)][::2]
    assert {large.count(channel) for channel in each} == {2}


KINDS = [
    lambda comm, tensor: comm.all_reduce_(tensor, op=ReduceOp.AVG),
    lambda comm, tensor: comm.reduce_scatter_(tensor),
    lambda comm, tensor: comm.all_gather_(tensor),
    lambda comm, tensor: comm.broadcast_(tensor, src=1),
]


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_collectives_give_the_bits_of_one_channel(world_size):
    draw = random.Random(world_size)
    kinds = draw.choices(KINDS, k=40)
    sizes = [draw.choice([30, 6_000, 90_000, 600_000]) for _ in kinds]
    dtypes = draw.choices([torch.float32, torch.bfloat16], k=40)

    def rank(comm):
        noise = torch.Generator().manual_seed(comm.rank)
        tensors = [
            torch.randn(size, generator=noise).to(dtype)
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
        works = [kind(comm, tensor) for kind, tensor in zip(kinds, tensors, strict=True)]
        for work in reversed(works):
            work.wait()
        return tensors

    one, three = run_ranks(world_size, rank), run_ranks(world_size, rank, num_channels=3)
    for ours, theirs in zip(three, one, strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def test_a_collective_ends_while_the_one_before_it_waits_for_its_messages():
    def rank(comm):
        second_is_over = threading.Event()
        wait = comm.transport.wait

        def held_up_in_the_first_channel(requests):
            if threading.current_thread() is first.thread._thread:
                assert second_is_over.wait(60)
            wait(requests)

        first = comm._channels.first
        comm.transport.wait = held_up_in_the_first_channel
        before, after = torch.ones(300_000), torch.ones(300_000)
        works = [comm.all_reduce_(before), comm.all_reduce_(after)]
        works[1].wait()
        assert after.eq(2).all()
        assert not works[0].done()
        second_is_over.set()
        works[0].wait()
        assert before.eq(2).all()

    run_ranks(2, rank, num_channels=2)
