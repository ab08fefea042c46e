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

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import set_multithreading_enabled
from torch.nn import Parameter
from torch.optim import SGD, AdamW

from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.comm.backends.nccl import NCCLCommunicator
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.gradients.compression import (
    DGC,
    Compressor,
    Int8,
    OneBit,
    PowerSGD,
    TernGrad,
    TopK,
)
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.optim import LAMB
from tests.comm.backends.fake_nccl import CPUTensorsOverNCCL, over_fake_nccl
from tests.gpu import DEVICE, ON_GPU
from tests.thread_ranks import ThreadCommunicator, run_ranks

pytestmark = ON_GPU
TIMEOUT = timedelta(seconds=20)  # of the ranks of one run
STEPS = 4
INFINITE_AT = 2  # step, counted from 0
SHAPES = [(129, 257), (513,), (64, 3, 3, 3), (1,)]  # of gradients: shards are not aligned
COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "int8": lambda: Int8(0),
    "onebit": lambda: OneBit(0),
    "powersgd": lambda: PowerSGD(rank=2, start_iter=0),
    "topk": lambda: TopK(0.05, 0),
    "dgc": lambda: DGC(0.05, warmup_steps=0, min_numel=0),
    "terngrad": lambda: TernGrad(min_numel=0),
}

Make = Callable[[Any], torch.optim.Optimizer]
MakeAlgorithm = Callable[[], Averaging | Sharded]


@pytest.fixture
def ranks(monkeypatch):
    """``ranks(world_size, fn)``: the results of ``fn(comm)``, by rank, complete on the GPU."""
    backend = NCCLCommunicator if DEVICE == "cuda" else CPUTensorsOverNCCL
    open_nccl = over_fake_nccl(monkeypatch, backend)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)

    def run(world_size: int, fn: Callable[[Any], Any]) -> list[Any]:
        def rank(host: ThreadCommunicator) -> Any:
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


def net_of(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 24, 3, stride=2)
    linear = nn.Flatten(), nn.Linear(216, 37), nn.Tanh(), nn.Linear(37, 5)
    net = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), *linear)
    return net.to(dtype, memory_format=torch.channels_last)


def batches(step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(24, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(
    comm: Communicator | None,
    net: nn.Module,
    algorithm: Averaging | Sharded | None,
    make: Make,
    *,
    accumulates: bool = False,
    clips: bool = False,
) -> dict[str, Tensor]:
    """Train a copy of ``net`` on this rank's part of each batch; without ``comm`` on the whole.

    Returns the parameters; under `Averaging` also the gradients of the last step, and with mirrors
    the differences between them and what they mirror.
    """
    dtype = next(net.parameters()).dtype
    net = copy.deepcopy(net).to(DEVICE)
    optimizer = make(net.parameters())
    if algorithm is not None:
        assert comm is not None
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
            with nullcontext() if algorithm is None else algorithm.forward():
                loss = net(inputs).square().mean()
            stays = accumulates and micro == 0 and algorithm is not None
            with (
                algorithm.backwards.no_sync() if stays else nullcontext(),
                nullcontext() if algorithm is None else algorithm.backward(),
            ):
                loss.backward()
        if clips:
            clip = nn.utils.clip_grad_norm_ if algorithm is None else algorithm.clip_grad_norm_
            clip(net.parameters(), 0.1)
        if algorithm is not None:
            algorithm.before_commit()
        optimizer.step()
        if algorithm is not None:
            algorithm.after_commit()
    result = {}
    if isinstance(algorithm, Sharded):
        algorithm.wait_parameters()
        if algorithm.mirrors_shards:
            result["mirrors"] = differences_of_mirrors(algorithm)
    else:
        result["gradients"] = flat_of([p.grad for p in net.parameters()])  # type: ignore[misc]
    result["parameters"] = flat_of(list(net.parameters()))
    if algorithm is not None:
        algorithm.detach()
    return result


def differences_of_mirrors(algorithm: Sharded) -> Tensor:
    """A mirror has stepped with the gradients that it received, its owner with its own."""
    assert algorithm._mirrors is not None
    found = []
    for bucket in algorithm._attached.buckets:
        for part in bucket.shards:
            mirror = algorithm._mirrors.by_param[part.param]
            found.append(mirror.weight.detach() - mirror.part(bucket.flat))
    return flat_of(found)


def flat_of(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def largest(values: Iterable[Tensor]) -> float:
    """NaN, if there is one."""
    return float(torch.stack(list(values)).max())


def check(
    ranks: Any,
    world_size: int,
    algorithm: MakeAlgorithm,
    make: Make,
    allowed: float,
    *,
    dtype: torch.dtype = torch.float64,
    **features: bool,
) -> None:
    """Ranks beside one process on the same GPU. A listener records collectives, as the monitor
    does.
    """
    net = net_of(dtype)
    expected = train(None, net, None, make, **features)

    def rank(comm: Communicator) -> dict[str, Tensor]:
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


def same_bits(found: list[list[Tensor]]) -> list[Tensor]:
    for result in found:
        for one, other in zip(result, found[0], strict=True):
            assert torch.equal(one, other), "ranks hold different bits"
    return found[0]


RING, SHARDED = (partial(algorithm, bucket_cap_mb=0.02) for algorithm in (Averaging, Sharded))
BOTH = pytest.mark.parametrize("algorithm", [RING, SHARDED], ids=["ring", "sharded"])
MAKE_SGD: Make = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
MAKE_LAMB: Make = partial(LAMB, lr=0.01, eps=1e-3)


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
    def mirrored() -> Sharded:
        algorithm = SHARDED()
        algorithm.mirrors_shards = True
        return algorithm

    check(ranks, 3, mirrored, MAKE_SGD, 1e-12)


# -- a loss scaler


def scaled(
    comm: Communicator, net: nn.Module, algorithm: Any, layer: str, *, fused: bool
) -> list[tuple[float, Tensor]]:
    """For each step the scale after it, and the parameters. On rank 1 a gradient of ``layer``
    becomes infinite. A fused optimizer unscales, and skips, in its own step.
    """
    net = copy.deepcopy(net).to(DEVICE)
    fused_adam = partial(AdamW, lr=0.01, fused=True)
    optimizer = (fused_adam if fused else partial(SGD, lr=0.1))(net.parameters())
    algorithm.attach(net, [optimizer], comm)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=16.0, growth_interval=100)
    bias: Any = net.get_submodule(layer).bias
    steps = []
    for step in range(STEPS + 1):
        inputs = batches(step, torch.float32).chunk(comm.world_size)[comm.rank].to(DEVICE)
        with algorithm.forward():
            loss = net(inputs).square().mean()
        optimizer.zero_grad()
        factor = torch.inf if step == INFINITE_AT and comm.rank == 1 else 1.0
        handle = bias.register_hook(lambda grad, factor=factor: grad * factor)
        with algorithm.backward():
            scaler.scale(loss).backward()
        handle.remove()
        algorithm.before_step(optimizer, has_closure=False)
        if not fused:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        algorithm.after_step(optimizer)
        algorithm.wait_parameters()
        steps.append((scaler.get_scale(), flat_of(list(net.parameters())).clone()))
    algorithm.detach()
    return steps


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer", ["0", "7"])  # of different ranks' shards
def test_an_infinity_on_one_rank_skips_the_step_on_all(ranks, algorithm, fused, layer):
    net = net_of(torch.float32)
    found = ranks(3, lambda comm: scaled(comm, net, algorithm(), layer, fused=fused))
    same_bits([[params for _, params in steps] for steps in found])
    assert [scale for scale, _ in found[0]] == [16, 16, 8, 8, 8]
    for number, ((_, before), (_, after)) in enumerate(pairwise(found[0]), 1):
        assert torch.equal(before, after) == (number == INFINITE_AT), f"step {number}"
        assert after.isfinite().all(), f"step {number}"


# -- messages


def averages(comm: Communicator, compressor: Compressor, device: str, steps: int) -> list[Tensor]:
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
        found.append(flat_of([p.grad for p in params]).cpu())  # type: ignore[misc]
    reducer.remove()
    return found


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def both(
    ranks: Any, make: Callable[[], Compressor], world_size: int, steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Averages on the device, and of the same compressor on the CPU, over a ring."""
    expected = run_ranks(world_size, lambda comm: averages(comm, make(), "cpu", steps))[0]
    found = ranks(world_size, lambda comm: averages(comm, make(), DEVICE, steps))
    return same_bits(found), expected


@pytest.mark.parametrize("name", sorted(COMPRESSORS.keys() - {"terngrad"}))
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
