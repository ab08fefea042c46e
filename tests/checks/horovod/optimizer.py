"""`DistributedOptimizer` of `lightning_ring.horovod`."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ring.horovod as hvd
from lightning_ring.errors import ModelMismatchError, RingError
from lightning_ring.gradients.compression import ErrorFeedback, Int8
from tests.checks.loops import assert_same, batches, loss_of, network, sgd

RANK, SIZE = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
torch.set_num_threads(1)


def check_the_optimizer_equals_ddp() -> None:
    hvd.init()
    model, reference = network(seed=RANK), network(seed=0)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    wrapped, plain = DistributedDataParallel(reference), sgd(reference)
    for inputs in batches(5):
        for net, one in ((wrapped, plain), (model, optimizer)):
            one.zero_grad()
            loss_of(net(inputs)).backward()
            if one is optimizer:
                one.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            with optimizer.skip_synchronize() if one is optimizer else warnings.catch_warnings():
                one.step()
    assert_same(model, reference)


def check_accumulation_sums_and_sum_and_compression() -> None:
    hvd.init()
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(SIZE))):
        model = network()
        expected = copy.deepcopy(model)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            op=op,
        )
        optimizer.set_backward_passes_per_step(2)
        mine = batches(4)
        everyones: list[Any] = MPI.COMM_WORLD.allgather(mine)
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        for step in range(2):
            for net, one, loaders in ((model, optimizer, [mine]), (expected, plain, everyones)):
                one.zero_grad()
                for loader in loaders:
                    for number, inputs in enumerate(loader[2 * step : 2 * step + 2]):
                        scale = factor / SIZE if net is expected else 1.0
                        (loss_of(net(inputs)) * scale).backward()
                        # after the first one of two, gradients are this rank's own
                        if net is model:
                            grads: list[Any] = MPI.COMM_WORLD.allgather(
                                net[0].weight.grad.flatten().tolist()
                            )
                            assert len({tuple(grad) for grad in grads}) == (
                                SIZE if number == 0 else 1
                            )
                one.step()
        assert_same(model, expected, tolerance=1e-6)
    model = network()
    half = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=hvd.Compression.fp16
    )
    loss_of(model(batches(1)[0])).backward()
    half.step()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert grads
    assert all(torch.equal(grad, grad.half().float()) for grad in grads)


def check_a_step_in_a_hook_is_an_error_and_a_backward_that_raised_is_dropped() -> None:
    hvd.init()
    model, expected = network(), network()
    planted: list[bool] = []
    model[0].weight.register_hook(lambda _: 1 / 0 if planted else None)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    wrapped, plain = DistributedDataParallel(expected), sgd(expected)
    for number, inputs in enumerate(batches(6)):
        planted[:] = [True] if number in (0, 3) else []
        with pytest.raises(ZeroDivisionError) if planted else contextlib.nullcontext():
            loss_of(model(inputs)).backward()
        if number == 3:
            with pytest.raises(RingError, match=r"a backward raised .* call zero_grad\(\)"):
                optimizer.step()
        if not planted:
            loss_of(wrapped(inputs)).backward()
            optimizer.step()
            plain.step()
        optimizer.zero_grad()
        plain.zero_grad()
    assert_same(model, expected)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with pytest.raises(RingError, match="SGD steps inside backward"):
        loss_of(model(batches(1)[0])).backward()


def check_compressors_of_the_strategy_carry_gradients() -> None:
    hvd.init()
    for compression, tolerance in (
        (Int8(min_numel=1), 0.01),
        ("bf16", 0.01),
        (ErrorFeedback(Int8(min_numel=1)), 0.01),
    ):
        model = network()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0),
            model.named_parameters(),
            compression=compression,
        )
        loss_of(model(batches(1)[0])).backward()
        own = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        for param, start, grad in zip(model.parameters(), before, own, strict=True):
            mean = torch.from_numpy(np.mean(MPI.COMM_WORLD.allgather(grad.numpy()), 0))
            found = start - param.detach()
            assert (found - mean).abs().max() <= tolerance * mean.abs().max() + 1e-6
            assert (
                len({each.tobytes() for each in MPI.COMM_WORLD.allgather(param.detach().numpy())})
                == 1
            )
    model = network()
    with pytest.raises(
        ValueError,
        match=r"compression='int9' with op=Average, expected .*, fp16 or bf16, one of fp16",
    ):
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression="int9")
    with pytest.raises(ValueError, match=r"fp16 or bf16\.$"):
        hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression="int8", op=hvd.Adasum
        )
    with pytest.raises(ValueError, match="momentum twice"):
        hvd.DistributedOptimizer(sgd(model), model.named_parameters(), compression="dgc")


def check_a_rank_without_gradients_takes_part_with_zeros() -> None:
    hvd.init()
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    for _ in range(2):
        if RANK == 0:
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(model.weight, torch.full((1, 2), 1.0 - 2 / SIZE))


def check_what_scripts_do_that_horovod_did_not_expect() -> None:
    """A sum without a step, twice named, gradients put there by hand, and a backward again after
    the end.
    """
    hvd.init()
    weight = nn.Parameter(torch.zeros(1))
    named = [("encoder.weight", weight), ("decoder.weight", weight)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named, op=hvd.Sum)
    for _ in range(2):  # the first sum is not stepped
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.synchronize()
        assert weight.grad is not None
        assert weight.grad.item() == hvd.size()
    with pytest.raises(
        ValueError, match=r"step\(closure\) was called with DistributedOptimizer\(op=Sum\)"
    ):
        optimizer.step(lambda: 0.0)
    pair = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2)])
    each = [
        hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), pair.named_parameters(), op=hvd.Sum)
        for p in pair
    ]
    (pair[0] + pair[1]).sum().backward()
    for one in each:
        one.step()
    assert [p.item() for p in pair] == [-hvd.size()] * 2
    plain = torch.zeros(1, requires_grad=True)  # no Parameter
    by_hand = hvd.DistributedOptimizer(torch.optim.SGD([plain], lr=1.0), [("plain", plain)])
    plain.sum().backward()
    by_hand.step()
    assert plain.item() == -1
    (plain.grad,) = torch.autograd.grad((plain * (hvd.rank() + 1)).sum(), plain)
    by_hand.step()
    assert plain.item() == pytest.approx(-1 - (hvd.size() + 1) / 2)
    hvd.broadcast_parameters([tensor := torch.full((2, 3), hvd.rank() + 1.0)], 0)
    assert tensor.eq(1).all()
    rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(hvd.size()) + 10 * hvd.rank()))
    assert rows.tolist() == [10 * rank + hvd.rank() for rank in range(hvd.size())]
    assert received.tolist() == [1] * hvd.size()
    for wrong, message in (
        (torch.ones(1, dtype=torch.bool), r"op=Sum got a tensor of torch.bool. Use op=Max"),
        (torch.ones(1, device="meta"), "found a tensor without values"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.allreduce(wrong, op=hvd.Sum, name="wrong")
    assert hvd.allreduce(torch.ones(1), name="afterwards").item() == 1
    if hvd.size() > 1:
        another = nn.Linear(3, 2 + hvd.rank())
        with pytest.raises(
            ModelMismatchError, match=r"parameter weight: rank 0: float32 \(2, 3\) on cpu; rank 1: "
        ):
            hvd.DistributedOptimizer(
                torch.optim.SGD(another.parameters(), lr=1.0), another.named_parameters()
            )
    hvd.shutdown()
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="was shut down"):
            plain.sum().backward()
