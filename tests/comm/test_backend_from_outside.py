"""A backend that writes the five required methods has all of a `Communicator`, and a `Reducer`
trains over it.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_ring.comm.communicator import Communicator, CompletedWork, ReduceOp, shard
from lightning_ring.errors import CollectiveError, ConfigurationError
from lightning_ring.gradients.reducer import Reducer
from tests.thread_ranks import run_ranks


class FiveMethods(Communicator):
    """Over ``everyones``, which gives all ranks' copies of a tensor."""

    def __init__(self, host):
        self.rank, self.world_size, self._everyones = host.rank, host.world_size, host.all_gather
        self.closed = False

    def all_reduce_(self, tensor, *, op=ReduceOp.SUM, name=""):
        stacked = torch.stack(self._everyones(tensor))
        tensor.copy_(stacked.sum(0) / (self.world_size if op is ReduceOp.AVG else 1))
        return CompletedWork()

    def reduce_scatter_(self, flat, *, op=ReduceOp.SUM, name=""):
        return self.all_reduce_(flat, op=op, name=name)

    def all_gather_(self, flat, *, name=""):
        for index, other in zip(self.shard_indices, self._everyones(flat), strict=True):
            shard(flat, self.world_size, index).copy_(shard(other, self.world_size, index))
        return CompletedWork()

    def broadcast_(self, tensor, *, src=0, name=""):
        tensor.copy_(self._everyones(tensor)[src])
        return CompletedWork()

    def close(self):
        self.closed = True


class BackwardsCommunicator(FiveMethods):
    """Its reduce-scatter leaves the last shard on rank 0."""

    @property
    def shard_indices(self):
        return range(self.world_size)[::-1]


@pytest.mark.parametrize("kind", [FiveMethods, BackwardsCommunicator])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_other_methods_are_written_over_the_five(world_size, kind):
    def rank(host):
        comm, ranks = kind(host), range(world_size)
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.complex64):
            gathered = comm.all_gather(torch.full((2, 3), comm.rank % 2).to(dtype))
            assert [row[1, 2].item() for row in gathered] == [
                torch.tensor(r % 2).to(dtype).item() for r in ranks
            ]
            sent = [torch.full((comm.rank + 2 * peer,), comm.rank % 2).to(dtype) for peer in ranks]
            received = [torch.empty(peer + 2 * comm.rank, dtype=dtype) for peer in ranks]
            comm.all_to_all(sent, received).wait()
            for peer in ranks:
                assert torch.equal(
                    received[peer], torch.full((peer + 2 * comm.rank,), peer % 2).to(dtype)
                )
        objects = comm.all_gather_object({"rank": comm.rank, "text": "ß" * 1000 * comm.rank})
        assert [(each["rank"], len(each["text"])) for each in objects] == [
            (r, 1000 * r) for r in ranks
        ]
        for src in ranks:
            assert comm.broadcast_object(("from", comm.rank), src=src) == ("from", src)
        with pytest.raises(ConfigurationError, match="ranks go from 0"):
            comm.broadcast_object(None, src=world_size)
        if world_size > 1:
            too_much = [torch.ones(int(comm.rank == 1)), *[torch.ones(0)] * (world_size - 1)]
            with pytest.raises(CollectiveError, match="rank 1 sends 4 bytes of float32 to rank 0"):
                comm.all_to_all(too_much, [torch.empty(0)] * world_size)
            with pytest.raises(
                CollectiveError, match="rank 0 tried to send an object that cannot be pickled"
            ):
                comm.broadcast_object(lambda: None)
        comm.barrier()
        assert comm.empty(7, torch.float64, torch.device("cpu")).shape == (7,)
        assert comm.shard_index == comm.shard_indices[comm.rank]
        comm.abandon()
        assert comm.closed

    run_ranks(world_size, rank)


def test_a_backend_that_lacks_a_collective_cannot_be_made():
    class Incomplete(Communicator):
        def close(self): ...

    with pytest.raises(TypeError, match="all_gather_"):
        Incomplete()


def test_a_plain_loop_trains_over_it_as_one_process_does():
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    xs, ys = torch.randn(20, 6, dtype=torch.float64), torch.randint(0, 3, (20,))

    def train(net, x, y, backward):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            with backward():
                F.cross_entropy(net(x), y).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(net.parameters()).detach()

    def rank(host):
        net = copy.deepcopy(start)
        reducer = Reducer(FiveMethods(host), net.named_parameters(), bucket_cap_mb=0.0005)
        rows = slice(10 * host.rank, 10 * host.rank + 10)
        return train(net, xs[rows], ys[rows], reducer.backward)

    first, second = run_ranks(2, rank)
    assert torch.equal(first, second)
    torch.testing.assert_close(
        first, train(copy.deepcopy(start), xs, ys, nullcontext), rtol=1e-12, atol=1e-12
    )
