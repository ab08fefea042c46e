"""Compressors that send messages of their own: bytes that leave, and nested rings. Ranks are
threads.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import SGD, Adam
from torch.testing import assert_close

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.comm.communicator import ChainedWork, shard
from lightning_ring.gradients.compression import DGC, Int8, OneBit, TernGrad, TopK
from lightning_ring.gradients.compression.between_nodes import Part
from lightning_ring.gradients.compression.top_k import largest
from lightning_ring.gradients.reducer import Reducer
from tests.checks.compression import references
from tests.checks.compression.formulas import SIZES, OneTensor, Sender, assert_equals, gradient
from tests.comm.test_hierarchical import run_nested
from tests.refusals import refused
from tests.thread_ranks import run_ranks

NODES = [[0, 2], [1, 3]]


def sent_bytes(compressor, comm, numel):
    """What this rank's transport sends for one average of ``numel`` gradients."""
    total, isend = 0, comm.transport.isend

    def counted(tensor, dst, tag=0):
        nonlocal total
        total += tensor.nbytes
        return isend(tensor, dst, tag)

    comm.transport.isend = counted
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
    if compressor is None:
        comm.all_reduce_(flat).wait()
    else:
        compressor.prepare(flat, OneTensor(flat, (numel,)))
        compressor.all_reduce(flat, comm, name="bucket").wait()
    comm.transport.isend = isend
    return total


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(
    ("make", "share"),
    [
        (Int8, 0.27),
        (TernGrad, 0.09),
        (OneBit, 0.05),
        (partial(DGC, warmup_steps=0), 0.02),
        (TopK, 0.05),
    ],
    ids=["int8", "terngrad", "onebit", "dgc", "topk"],
)
def test_bytes_that_leave(make, share, world_size):
    numel = 400_000

    def count(comm):
        return sent_bytes(None, comm, numel), sent_bytes(make(), comm, numel)

    for whole, compressed in run_ranks(world_size, count):
        assert compressed <= share * whole


every_formula = pytest.mark.parametrize(
    ("make", "formula"),
    [
        (Int8, references.int8),
        (OneBit, references.onebit),
        (partial(TopK, 0.05), partial(references.topk, 0.05)),
        (partial(DGC, 0.05, momentum=0, warmup_steps=0), partial(references.topk, 0.05)),
    ],
    ids=["int8", "onebit", "topk", "dgc"],
)
flat_and_nested = pytest.mark.parametrize(
    "run", [partial(run_ranks, 4), partial(run_nested, NODES)]
)


@every_formula
def test_nodes_exchange_compressed_averages(make, formula):
    """As many jobs as a node has ranks, each with a part of the nodes' exact averages."""
    num_steps = 5

    def rank(comm):
        send = Sender(make(min_numel=0), comm)
        return [send(gradient(comm.rank, step)) for step in range(num_steps)]

    found = run_nested(NODES, rank)
    jobs = [formula() for _ in NODES[0]]
    for step in range(num_steps):
        nodes = [torch.stack([gradient(rank, step) for rank in node]).mean(0) for node in NODES]
        parts = [
            job([shard(node, len(jobs), i).numpy() for node in nodes]) for i, job in enumerate(jobs)
        ]
        wanted = np.concatenate(parts)
        wrong = np.abs(found[0][step].numpy() - wanted) > 1e-4 * np.abs(wanted).max()
        assert wrong.mean() < 0.002, (step, wrong.sum())
        assert all(torch.equal(other[step], found[0][step]) for other in found)


@pytest.mark.parametrize(
    "make", [partial(TernGrad, min_numel=0), partial(DGC, 0.05, warmup_steps=2, min_numel=0)]
)
def test_nested_ranks_hold_the_same_bits(make):
    def rank(comm):
        send = Sender(make(), comm)
        return torch.stack([send(gradient(comm.rank, step)) for step in range(4)])

    found = run_nested(NODES, rank)
    assert found[0].isfinite().all()
    assert found[0].count_nonzero() > 100
    assert all(torch.equal(other, found[0]) for other in found)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
@every_formula
def test_codes_are_those_of_the_papers(make, formula, world_size):
    run_ranks(world_size, lambda comm: assert_equals(make(min_numel=0), formula(), comm, 3))


@pytest.mark.parametrize("scale", [1.0, 1e-18, 1e-24, 1e-37, 1e-42])
def test_ternary_gradients_may_be_tiny(scale):
    """Their squares are below float32's range, and 1e-42 has no reciprocal there."""

    values = torch.randn(sum(SIZES), generator=torch.Generator().manual_seed(0))

    def rank(comm):
        send = Sender(TernGrad(min_numel=0), comm)
        return torch.stack([send(scale * values) for _ in range(200)]).double().mean(0)

    mean, _ = run_ranks(2, rank)
    values = values.double()
    if scale < 1e-38:
        assert mean.isfinite().all()
    else:
        kept = values.abs() < 2 * values.square().mean().sqrt()  # the others may be clipped
        assert torch.corrcoef(torch.stack([mean[kept] / scale, values[kept]]))[0, 1] > 0.9


@pytest.mark.parametrize("numel", [20_000, 4097, 100])  # the last one travels whole
@flat_and_nested
def test_a_shard_in_8_bits_has_the_bits_of_the_whole(run, numel):
    def rank(comm):
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(comm.rank))
        whole = flat.clone()
        Int8().all_reduce(whole, comm).wait()
        Int8().reduce_scatter(flat, comm).wait()
        own, expected = (shard(each, comm.world_size, comm.shard_index) for each in (flat, whole))
        if numel > 4096:
            assert torch.equal(own, expected)
        assert_close(own, expected)  # sums of a ring have another order

    run(rank)


@flat_and_nested
def test_what_is_owed_survives_new_buckets(run):
    """What has arrived and all errors make up the gradients, though the errors' owners change on
    the way.
    """

    def rank(comm):
        compressor = OneBit(min_numel=0)
        total = torch.zeros(sum(SIZES))
        send = Sender(compressor, comm)
        for step in range(12):
            turned = 4 <= step < 8
            if step in (4, 8):  # the same parameters, in another order
                send.flat = torch.zeros(sum(SIZES))
                compressor.prepare(
                    send.flat, OneTensor(send.flat, SIZES[::-1] if turned else SIZES)
                )
            values = list(gradient(comm.rank, 0).split(SIZES))
            got = send(torch.cat(values[::-1] if turned else values))
            total += torch.cat(got.split(SIZES[::-1])[::-1]) if turned else got
        server = compressor.compressor._server
        owed = [
            torch.cat([of(str(size)) for size in SIZES])
            for of in (compressor.residual, server.of_parameter)
        ]
        return total, owed[0], owed[1]

    totals, errors, owners = (torch.stack(each) for each in zip(*run(rank), strict=True))
    wanted = 12 * torch.stack([gradient(rank, 0) for rank in range(4)]).mean(0)
    assert_close(totals[0] + errors.mean(0) + owners.sum(0), wanted, rtol=1e-4, atol=1e-3)


def test_second_legs_of_all_buckets_leave_before_the_first_is_decoded():
    def rank(comm):
        params = [(str(index), Parameter(torch.zeros(5000))) for index in range(3)]
        reducer = Reducer(comm, params, bucket_cap_mb=0.01, compressor=Int8())
        told = []
        gather = comm.all_gather_

        def noted(flat, *, name=""):
            if "averages" not in name:
                return gather(flat, name=name)
            told.append("starts")
            return ChainedWork(gather(flat, name=name), lambda: told.append("ends"))

        comm.all_gather_ = noted
        with reducer.backward():
            sum((param * 2).sum() for _, param in params).backward()
        assert_close(params[0][1].grad, torch.full((5000,), 2.0))
        return told

    assert run_ranks(3, rank)[0] == ["starts"] * 3 + ["ends"] * 3


@pytest.mark.parametrize(
    "optimizer", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: Adam(p, 0.1)], ids=["sgd", "adam"]
)
def test_momentum_twice_is_refused(optimizer):
    net = torch.nn.Linear(3, 3)

    def rank(comm):
        Averaging(compression=DGC(momentum=0)).attach(net, [optimizer(net.parameters())], comm)
        without = Averaging(compression="dgc")
        without.attach(net, [SGD(net.parameters(), 0.1)], comm)
        with refused("momentum twice"):
            without.set_optimizers([optimizer(net.parameters())])
        with refused(r"'dgc' has momentum=0.9, and an optimizer has (momentum|betas)"):
            Averaging(compression="dgc").attach(net, [optimizer(net.parameters())], comm)

    run_ranks(1, rank)


@pytest.mark.parametrize("kind", ["normal", "heavy tail", "all equal", "periodic", "nan", "inf"])
def test_guessed_thresholds_find_exactly_the_largest(kind):
    numel, count = 1_000_003, 1000
    values = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    if kind == "heavy tail":
        values = values**7
    elif kind == "all equal":
        values = torch.ones(numel)
    elif kind == "periodic":  # the sample sees the large ones only
        values[:: numel // (1 << 16)] += 100
    elif kind in ("nan", "inf"):
        values[123_457] = float(kind)
    found = largest(values, count)
    assert found.unique().numel() == count
    assert_close(
        values[found].abs().sort().values,
        values.abs().topk(count).values.sort().values,
        rtol=0,
        atol=0,
        equal_nan=True,
    )


def test_ternary_sums_of_more_ranks_than_fit_into_a_byte_are_refused():
    group = SimpleNamespace(world_size=128, shard_index=0)
    flat = torch.zeros(128)
    with refused("128 ranks or nodes"):
        next(TernGrad().average(Part(flat, flat, group, None, "bucket")))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TopK(0), "ratio=0; expected the share"),
        (lambda: DGC(1.5), "ratio=1.5; expected the share"),
        (lambda: DGC(momentum=1), "momentum=1, clip_norm=None"),
        (lambda: DGC(clip_norm=0), "clip_norm=0"),
        (lambda: TernGrad(clip=0), "clip=0; expected"),
        (lambda: Int8(min_numel=-1), "Int8 got min_numel=-1"),
    ],
)
def test_arguments_that_cannot_work(make, words):
    with refused(words):
        make()
