"""Every way of training over collectives that run as late as a GPU's streams let them."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm import recording
from lightning_ring.comm.backends import nccl
from tests.comm.backends.late_nccl import over_late_nccl
from tests.compressors import COMPRESSORS
from tests.thread_ranks import run_ranks

CAP = 0.001


class Net(nn.Module):
    """Rank 1 leaves a layer out: flags tell it of the others' gradients."""

    def __init__(self, *, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 8, sparse=sparse)
        layers = [layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())]
        self.layers = nn.Sequential(*layers)
        self.more = nn.Linear(8, 8)

    def forward(self, words, rank):
        hidden = self.words(words)
        if rank == 0:
            hidden = self.more(hidden)
        return self.layers(hidden).square().mean()


def train(comm, net, algorithm, *, sparse=False, accumulates=False):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    algorithm.attach(net, [optimizer], comm)
    for step in range(4):
        words = torch.arange(3) * (2 + comm.rank) + step
        algorithm.begin_batch()
        optimizer.zero_grad()
        for last in (False, True) if accumulates else (True,):
            with algorithm.forward():
                loss = net(words, comm.rank)
            with nullcontext() if last else algorithm.backwards.no_sync(), algorithm.backward():
                loss.backward()
        if not sparse:
            algorithm.clip_grad_norm_(net.parameters(), 0.5)
        algorithm.before_commit()
        optimizer.step()
        algorithm.after_commit()
        algorithm.agreed_to_stop()
    algorithm.wait_parameters()
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    algorithm.detach()
    return weights


def mirrored():
    algorithm = Sharded(bucket_cap_mb=CAP)
    algorithm.mirrors_shards = True
    return algorithm


def check(monkeypatch, make, **options):
    results = []
    for late in (False, True):
        with monkeypatch.context() as patch:
            connect = over_late_nccl(patch, late=late)
            nets = [Net(sparse=options.get("sparse", False)) for _ in range(2)]

            def rank(comm, connect=connect, nets=nets):
                return train(connect(comm), nets[comm.rank], make(), **options)

            results.append(run_ranks(2, rank))
    assert torch.equal(results[1][0], results[0][0])
    assert torch.equal(results[1][1], results[0][1])
    assert results[0][0].isfinite().all()


@pytest.mark.parametrize("compression", COMPRESSORS)
def test_ring(monkeypatch, compression):
    compressor = COMPRESSORS[compression]
    check(monkeypatch, lambda: Averaging(bucket_cap_mb=CAP, compression=compressor()))


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16", "int8"])
def test_sharded(monkeypatch, compression):
    compressor = COMPRESSORS[compression]
    check(monkeypatch, lambda: Sharded(bucket_cap_mb=CAP, compression=compressor()))


def test_mirrored(monkeypatch):
    check(monkeypatch, mirrored)


def test_sparse(monkeypatch):
    check(monkeypatch, lambda: Averaging(bucket_cap_mb=CAP), sparse=True)


@pytest.mark.parametrize("algorithm", [Averaging, Sharded])
def test_accumulated(monkeypatch, algorithm):
    check(monkeypatch, lambda: algorithm(bucket_cap_mb=CAP), accumulates=True)


def early_write(comm):
    tensor = torch.ones(8)
    work = comm.all_reduce_(tensor)
    tensor.zero_()
    work.wait()


def freed_input(comm):
    """The work of torch alone, which a side stream has waited for."""
    tensor, group = torch.ones(8), comm._comm._group
    work = nccl.dist.all_reduce(tensor, op=nccl.dist.ReduceOp.SUM, group=group, async_op=True)
    with recording.gpu_module(tensor.device).stream("side"):
        work.wait()
    del tensor
    work.wait()


@pytest.mark.parametrize(
    ("broken", "message"), [(early_write, "written while"), (freed_input, "freed before")]
)
def test_a_path_that_breaks_the_rule_is_found(monkeypatch, broken, message):
    connect = over_late_nccl(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run_ranks(2, lambda comm: broken(connect(comm)))
