"""Every compressor on real ranks, one launch a world size and backend."""

from functools import partial

import pytest
import torch
from torch.nn import Parameter

from lightning_ring import RingStrategy
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.communicator import ReduceOp
from lightning_ring.gradients.compression import COMPRESSORS, Compressor, ErrorFeedback, PowerSGD
from lightning_ring.gradients.reducer import Reducer
from tests.battery import check_names
from tests.refusals import refused
from tests.thread_ranks import run_ranks

SHARDS = partial(Reducer, shards=True)

MODULE = "tests.checks.compression"


@pytest.mark.parametrize("check", check_names(MODULE))
@pytest.mark.parametrize(("world_size", "backend"), [(2, "gloo"), (3, "mpi")])
def test_compression(battery, world_size, backend, check):
    battery(MODULE, world_size, check, RING_CHECK_BACKEND=backend)


def test_the_registry_and_the_compressors_agree():
    for name, known in COMPRESSORS.items():
        assert known.build().name == name
        assert RingStrategy(compression=name).options.compression == name


def test_a_compressor_from_outside_is_given_as_an_instance():
    class Sent(Compressor):
        def all_reduce(self, flat, comm, *, lost=None, name=""):
            return comm.all_reduce_(flat, op=ReduceOp.AVG, name=name)

    RingStrategy(compression=ErrorFeedback(Sent()))
    with refused("cannot leave each rank its shard"):
        Sharded(compression=Sent())
    with refused(r"'fp16', 'bf16', 'fp32', 'int8', .* or a Compressor"):
        RingStrategy(compression=Sent)


def test_what_cannot_be_sharded_is_refused_by_both_names():
    for name, known in COMPRESSORS.items():
        if known.build().can_shard:
            Sharded(compression=name)
            continue
        with refused(f"Sharded got compression='{name}', which"):
            Sharded(compression=name)


@pytest.mark.parametrize("arguments", [{"rank": 0}, {"start_iter": -1}, {"min_compression": 0.5}])
def test_powersgd_refuses_what_cannot_work(arguments):
    with refused("PowerSGD got"):
        PowerSGD(**arguments)


@pytest.mark.parametrize("kind", [Reducer, SHARDS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_travel_as_float32_and_are_rounded_once(kind, dtype):
    gradients = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    sent = []

    def average(comm):
        collectives = {name: getattr(comm, name) for name in ("all_reduce_", "reduce_scatter_")}
        for name, collective in collectives.items():
            monitored = partial(_noting, sent, collective) if comm.rank == 0 else collective
            setattr(comm, name, monitored)
        param = Parameter(torch.zeros(1000, dtype=dtype))
        reducer = kind(comm, [("p", param)], compressor=COMPRESSORS["fp32"].build())
        for _ in range(2):
            param.grad = None
            with reducer.backward():
                (param * gradients[comm.rank]).sum().backward()
        assert param.grad is not None
        if kind is Reducer:
            return param.grad.clone()
        own = reducer.shards.of_gradient(param)
        return own.clone()

    averages = run_ranks(3, average)
    expected = gradients.float().mean(0).to(dtype)
    for found in averages if kind is Reducer else [torch.cat(averages)]:
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert set(sent) == {torch.float32}


def _noting(sent, collective, flat, **arguments):
    sent.append(flat.dtype)
    return collective(flat, **arguments)
