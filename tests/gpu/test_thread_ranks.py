"""The numbers of several ranks on one GPU.

NCCL refuses two ranks on one GPU. Here 2 to 4 ranks are threads of one process, each with a stream
of its own. Gradients, messages and norms go through the real NCCL backend of lightning_ring, over a
fake of NCCL (`tests/comm/backends/fake_nccl.py`): it computes what NCCL computes on a stream of its
own, after the streams of the callers and late, so that a rank which does not wait reads old values.

It proves, on the GPU's own kernels and streams: averages, sharded steps, mirrors, the decision of a
loss scaler, and what compressors send, with more ranks than one. It does not prove NCCL between
peers, autograd's thread for the GPU (a backward runs in its rank's thread here, because the ranks
would wait for each other in that one), or any speed.
"""

import copy
import math
from contextlib import nullcontext
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.gradients.compression import TernGrad
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.optim import LAMB
from tests.algorithms import test_loss_scaling
from tests.comm.backends.fake_nccl import CPUTensorsOverNCCL, over_fake_nccl
from tests.compressors import COMPRESSORS, MESSAGES
from tests.gpu import DEVICE, ON_GPU
from tests.thread_ranks import run_ranks

pytestmark = ON_GPU
TIMEOUT = timedelta(seconds=20)  # of the ranks of one run
STEPS = 4
SHAPES = [(129, 257), (513,), (64, 3, 3, 3), (1,)]  # of gradients: shards are not aligned


@pytest.fixture
def ranks(monkeypatch):
    """``ranks(world_size, fn)``: the results of ``fn(comm)``, by rank, complete on the GPU."""
    backend = NCCLCommunicator if DEVICE == "cuda" else CPUTensorsOverNCCL
    open_nccl = over_fake_nccl(monkeypatch, backend)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def run(world_size, fn):
        def rank(host):
            comm = open_nccl(host)
            if DEVICE == "cpu":
                return fn(comm)
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream), set_multithreading_enabled(False):
                result = fn(comm)
            stream.synchronize()
            return result

        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return run_ranks(world_size, rank, timeout=TIMEOUT)

    return run


# -- training


def net_of(dtype):
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2)
    linear = nn.Flatten(), nn.Linear(216, 37), nn.Tanh(), nn.Linear(37, 5)
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), *linear)
    return net.to(dtype, memory_format=torch.channels_last)


def batches(step, dtype):
    return torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(comm, net, algorithm, make, *, accumulates=False, clips=False):
    """Train a copy of ``net`` on this rank's part of each batch; without ``comm`` on the whole.

    Returns the parameters; under `Averaging` also the gradients of the last step, and with mirrors
    the differences between them and what they mirror.
    """
    dtype = next(net.parameters()).dtype
    net = copy.deepcopy(net).to(DEVICE)
    optimizer = make(net.parameters())
    algorithm.attach(net, [optimizer], comm)
    if isinstance(algorithm, Sharded):
        algorithm.overlaps = True  # which mirrors refuse
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for micro in range(1 + accumulates):
            inputs = batches(2 * step + micro, dtype)
            if comm is not None:
                inputs = inputs.chunk(comm.world_size)[comm.rank]
            inputs = inputs.to(DEVICE, memory_format=torch.channels_last)
            with algorithm.forward():
                loss = net(inputs).square().mean()
            stays = accumulates and micro == 0
            with (
                algorithm.backwards.no_sync() if stays else nullcontext(),
                algorithm.backward(),
            ):
                loss.backward()
        if clips:
            algorithm.clip_grad_norm_(net.parameters(), 0.1)
        if comm is not None:
            algorithm.before_commit()
        optimizer.step()
        if comm is not None:
            algorithm.after_commit()
    result = {}
    if isinstance(algorithm, Sharded):
        algorithm.wait_parameters()
        if algorithm.mirrors_shards:
            result["mirrors"] = differences_of_mirrors(algorithm)
    else:
        result["gradients"] = flat_of([p.grad for p in net.parameters()])
    result["parameters"] = flat_of(list(net.parameters()))
    algorithm.detach()
    return result


def differences_of_mirrors(algorithm):
    """A mirror has stepped with the gradients that it received, its owner with its own."""
    found = []
    for bucket in algorithm._attached.buckets:
        for part in bucket.shards:
            mirror = algorithm._mirrors.by_param[part.param]
            found.append(mirror.weight.detach() - mirror.part(bucket.flat))
    return flat_of(found)


def flat_of(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def largest(values):
    """NaN, if there is one."""
    return float(torch.stack(list(values)).max())


def check(ranks, world_size, algorithm, make, allowed, *, dtype=torch.float64, **features):
    """Ranks beside one process on the same GPU. A listener records collectives, as the monitor
    does.
    """
    net = net_of(dtype)
    expected = train(None, net, Algorithm(), make, **features)

    def rank(comm):
        recorded = RecordedCommunicator(comm, [lambda record: None])
        return train(recorded, net, algorithm(), make, **features)

    found = ranks(world_size, rank)
    same_bits([[result["parameters"]] for result in found])
    differences = [
        (values - expected.get(name, 0)).abs().max()
        for result in found
        for name, values in result.items()
    ]
    assert largest(differences) <= allowed


def same_bits(found):
    for result in found:
        for one, other in zip(result, found[0], strict=True):
            assert torch.equal(one, other), "ranks hold different bits"
    return found[0]


RING, SHARDED = (partial(algorithm, bucket_cap_mb=0.02) for algorithm in (Averaging, Sharded))
BOTH = pytest.mark.parametrize("algorithm", [RING, SHARDED], ids=["ring", "sharded"])
MAKE_SGD = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
MAKE_LAMB = partial(LAMB, lr=0.01, eps=1e-3)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ring(ranks, world_size):
    check(ranks, world_size, RING, MAKE_SGD, 1e-12)


@pytest.mark.parametrize("world_size", [2, 3])
def test_sharded(ranks, world_size):
    check(ranks, world_size, SHARDED, partial(AdamW, lr=0.01, eps=1e-4), 1e-9)


@BOTH
def test_lamb(ranks, algorithm):
    check(ranks, 3, algorithm, MAKE_LAMB, 2e-5, dtype=torch.float32)


@BOTH
def test_accumulation_and_clipping(ranks, algorithm):
    check(ranks, 3, algorithm, MAKE_SGD, 1e-12, accumulates=True, clips=True)


def test_mirrors(ranks):
    def mirrored():
        algorithm = SHARDED()
        algorithm.mirrors_shards = True
        return algorithm

    check(ranks, 3, mirrored, MAKE_SGD, 1e-12)


@pytest.mark.parametrize("strategy", ["ring", "ring_sharded"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer", [0, 4])  # of different ranks' shards
def test_an_infinity_on_one_rank_skips_the_step_on_all(ranks, strategy, fused, layer):
    test_loss_scaling.check(ranks, strategy, None, layer, fused, DEVICE)


# -- messages


def averages(comm, compressor, device, steps):
    """The averaged gradients of each step, on the CPU. With more than `STEPS` steps all of them
    have the same gradients.
    """
    params = [Parameter(torch.zeros(shape, device=device)) for shape in SHAPES]
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    recorded = RecordedCommunicator(comm, [lambda record: None])
    reducer = Reducer(recorded, named, bucket_cap_mb=0.1, compressor=compressor)
    found = []
    for step in range(steps):
        gradients = drawn(100 * comm.rank + (step if steps == STEPS else 0))
        for param in params:
            param.grad = None
        with reducer.backward():
            pairs = zip(params, gradients, strict=True)
            torch.stack([(p * grad.to(device)).sum() for p, grad in pairs]).sum().backward()
        found.append(flat_of([p.grad for p in params]).cpu())
    reducer.remove()
    return found


def drawn(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def both(ranks, make, world_size, steps):
    """Averages on the device, and of the same compressor on the CPU, over a ring."""
    expected = run_ranks(world_size, lambda comm: averages(comm, make(), "cpu", steps))[0]
    found = ranks(world_size, lambda comm: averages(comm, make(), DEVICE, steps))
    return same_bits(found), expected


@pytest.mark.parametrize("name", [name for name in MESSAGES if name != "terngrad"])
def test_compressors_send_what_they_send_on_a_cpu(ranks, name):
    """A value on the border between two codes may fall to either side, and so may one of two
    that compete for a place among the largest.
    """
    for world_size in (1, 2, 3):
        for ours, theirs in zip(*both(ranks, COMPRESSORS[name], world_size, STEPS), strict=True):
            near = (ours - theirs).abs() <= 1e-4 * theirs.abs().max()
            assert 1 - float(near.double().mean()) <= 1e-3


def test_terngrad_draws_other_numbers_with_the_same_error(ranks):
    """The error of the mean of many averages, relative to that on the CPU."""
    exact = torch.stack([flat_of(drawn(100 * rank)) for rank in range(3)]).mean(0)
    ours, theirs = (
        float((torch.stack(means).mean(0) - exact).norm())
        for means in both(ranks, partial(TernGrad, clip=math.inf, min_numel=0), 3, 20)
    )
    assert abs(ours / theirs - 1) <= 0.05
