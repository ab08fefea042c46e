"""What arrives is the average, on all ranks the same bits, whatever it travelled as."""

import torch
from torch.nn import Parameter
from torch.testing import assert_close

from lightning_ring.comm.communicator import shard
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.compression import COMPRESSORS, DGC, OneBit, PowerSGD
from lightning_ring.gradients.delivery import (
    average_compressed_,
    prepare_compressed,
    scatter_compressed_,
)
from lightning_ring.gradients.reducer import Reducer
from tests.checks.compression.ways import (
    COARSE,
    ERROR_OF_THE_MEAN,
    WAYS,
    assert_same_bits,
    average,
    gradients,
    make,
    parameters,
    send,
)
from tests.checks.world import communicator


def check_mean_over_steps_is_the_true_average_on_all_ranks():
    """Unbiased, or what is lost in one step comes with a later one: `steps` times the same
    gradient.

    For the coarse ones that takes many steps, which are taken on two ranks; elsewhere a few have to
    give the same bits.
    """
    for way in WAYS:
        reducer, params = make(way)
        mine = gradients(communicator().rank)
        many = communicator().world_size == 2
        steps = (60 if many else 3) if way in COARSE else 2
        total = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
        for _ in range(steps):
            for sum_, grad in zip(total, send(reducer, params, mine), strict=True):
                sum_ += grad
        assert_same_bits(*total)
        if way in COARSE and not many:
            continue
        wanted = torch.cat([g.reshape(-1) for g in average()])
        mean = torch.cat([g.reshape(-1) for g in total]) / steps
        error = float((mean - wanted).norm() / wanted.norm())
        assert error < ERROR_OF_THE_MEAN.get(way, 0.004), (way, error)
        if way not in ERROR_OF_THE_MEAN:  # rounding to nearest: as often up as down
            assert abs(float((mean - wanted).mean() / wanted.abs().mean())) < 0.002, way


def check_flags_survive():
    """A gradient that one rank has is averaged with zeros, one that none has stays `None`, and a
    stop reaches all.
    """
    rank, size = communicator().rank, communicator().world_size
    for way in WAYS:
        reducer, params = make(way)
        for step in range(4):
            mine = list(gradients(rank, step))
            if rank != size - 1:
                mine[0] = None
            mine[4] = mine[4] if step == 3 else None
            reducer.stop_requested = step == 2 and rank == size - 1
            got = send(reducer, params, mine)
            assert got[0] is not None, way
            assert (got[4] is None) == (step < 3), (way, step)
            assert reducer.agreed_to_stop() == (step == 2), (way, step)
            assert_same_bits(*got)


def check_what_nobody_got_is_still_owed():
    """The error of a gradient that no rank used is not lost with the `None` that everybody is
    left with.
    """
    for compressor in (
        PowerSGD(start_iter=0),
        OneBit(min_numel=0),
        DGC(0.1, warmup_steps=0, min_numel=0),
    ):
        reducer, params = make(compressor)
        mine = list(gradients(communicator().rank))
        send(reducer, params, mine)
        kept = (
            [compressor.residual, compressor.velocity]
            if isinstance(compressor, DGC)
            else [compressor.residual]
        )
        before = [of("conv").clone() for of in kept]
        assert all(tensor.norm() > 0 for tensor in before)
        if isinstance(compressor, OneBit):  # of the ranks whose shards have a part of it
            kept.append(compressor.compressor._server.of_parameter)
            before.append(kept[-1]("conv").clone())
        send(reducer, params, [*mine[:4], None])
        assert all(
            torch.equal(of("conv"), tensor) for of, tensor in zip(kept, before, strict=True)
        ), compressor.name


def check_divides_by_the_ranks_that_hold_data():
    size = communicator().world_size
    active = max(1, size - 1)
    has_data = communicator().rank < active
    for way in WAYS:
        found = []
        for active_ranks in (None, active):
            reducer, params = make(way)
            reducer.active_ranks = active_ranks
            found.append(
                send(
                    reducer,
                    params,
                    list(gradients(communicator().rank)) if has_data else [None] * len(params),
                )
            )
            assert_same_bits(*found[-1])
        for whole, divided, wanted in zip(*found, average(ranks=active), strict=True):
            assert_close(divided, whole * (size / active), rtol=0.01, atol=1e-5)
            if way in ("fp16", "bf16", "fp32"):
                assert_close(divided.double(), wanted, rtol=0.01, atol=0.02)


def check_shards_hold_the_bits_of_the_whole():
    comm = communicator()
    for way in COMPRESSORS:
        compressor = WAYS[way]()
        if not (compressor.can_shard and compressor.accepts(torch.float32)):
            continue
        (name, param), flats = parameters()[4], []
        for send_ in (average_compressed_, scatter_compressed_):
            bucket = Bucket([name], [param])
            prepare_compressed(bucket, compressor)
            param.grad = gradients(comm.rank)[4]
            bucket.fill([True], stop=False)
            for divisor in (comm.world_size, comm.world_size + 1):
                # which leaves the flags out
                if send_ is average_compressed_ and compressor.buffer_dtype is None:
                    bucket.flags.zero_()  # as the other way does
                    compressor.all_reduce(bucket.flat, comm).wait()
                    bucket.flat.mul_(comm.world_size / divisor)
                else:
                    send_(bucket, compressor, comm, divisor, "bucket").wait()
                flats.append(shard(bucket.flat, comm.world_size, comm.shard_index).clone())
                param.grad = gradients(comm.rank)[4]
                bucket.fill([True], stop=False)
        assert torch.equal(flats[0], flats[2]), way
        assert torch.equal(flats[1], flats[3]), way


def check_large_values():
    """An average that float16 holds survives a sum that it does not; beyond it comes inf, on all
    ranks.
    """
    for way in ("fp16", "bf16"):
        reducer, params = make(way)
        got = send(reducer, params, [torch.full_like(p, 60_000.0) for p in params])
        assert all(torch.equal(g, torch.full_like(g, got[0][0, 0].item())) for g in got)
        assert_close(got[0][0, 0].item(), 60_000.0, rtol=4e-3, atol=0)
        last = communicator().rank == communicator().world_size - 1
        got = send(reducer, params, [torch.full_like(p, 7e4 if last else 0.0) for p in params])
        assert_same_bits(*got)
        assert torch.isinf(got[0]).all() == (way == "fp16")


def check_other_dtypes_travel_as_they_are_and_this_is_said_once():
    comm = communicator()
    kinds = [torch.float64, torch.bfloat16, torch.complex64]
    for way in COMPRESSORS:
        named = [(f"{kind}", Parameter(torch.zeros(40, 40, dtype=kind))) for kind in kinds]
        warnings = []
        compressor = WAYS[way]()
        reducer = Reducer(comm, named, compressor=compressor, warn=warnings.append)
        exact = [1.0 + 2.0**-7 + 2.0**-40, 1.0 + 2.0**-7, 1.0 + 2.0**-20]
        for _ in range(2):
            for _, param in named:
                param.grad = None
            with reducer.backward():
                sum(
                    (param * value).real.sum()
                    for (_, param), value in zip(named, exact, strict=True)
                ).backward()
        for (_, param), value in zip(named, exact, strict=True):
            tolerance = 1e-12 if way == "powersgd" else 0
            assert_close(
                param.grad.real, torch.full_like(param.real, value), rtol=tolerance, atol=0
            )
        refused = [kind for kind in kinds if not compressor.accepts(kind)]
        assert len(warnings) == len(refused), warnings
        assert all(any(str(kind) in warning for warning in warnings) for kind in refused), warnings
