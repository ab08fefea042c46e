"""`DistributedOptimizer` of `lightning_ring.horovod`."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_ring.horovod as hvd
from lightning_ring.errors import ModelMismatchError, RingError
from lightning_ring.gradients.compression import ErrorFeedback, Int8
from tests.checks.horovod.world import RANK, SIZE, WORLD, assert_equal_everywhere, distributed
from tests.checks.loops import assert_same, batches, loss_of, network, sgd


def check_accumulation_sums_and_sum_and_compression():
    hvd.init()
    mine = batches(4)
    everyones = WORLD.allgather(mine)
    for op, factor in ((hvd.Average, 1.0), (hvd.Sum, float(SIZE))):
        model = network()
        expected = copy.deepcopy(model)
        optimizer = distributed(model, op=op)
        optimizer.set_backward_passes_per_step(2)
        plain = torch.optim.SGD(expected.parameters(), lr=0.1)
        for step in (0, 2):
            optimizer.zero_grad()
            for number, inputs in enumerate(mine[step : step + 2]):
                loss_of(model(inputs)).backward()
                grads = WORLD.allgather(model[0].weight.grad.flatten().tolist())
                # after the first one of two, gradients are this rank's own
                assert len({tuple(grad) for grad in grads}) == (SIZE if number == 0 else 1)
            optimizer.step()
            plain.zero_grad()
            for loader in everyones:
                for inputs in loader[step : step + 2]:
                    (loss_of(expected(inputs)) * factor / SIZE).backward()
            plain.step()
        assert_same(model, expected, tolerance=1e-6)
    model = network()
    half = distributed(model, compression=hvd.Compression.fp16)
    loss_of(model(batches(1)[0])).backward()
    half.step()
    grads = [param.grad for param in model.parameters()]
    assert all(torch.equal(grad, grad.half().float()) for grad in grads)


def check_a_step_in_a_hook_is_an_error_and_a_backward_that_raised_is_dropped():
    hvd.init()
    model, expected = network(), network()
    planted = []
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


def check_compressors_of_the_strategy_carry_gradients():
    hvd.init()
    for compression in (Int8(min_numel=1), "bf16", ErrorFeedback(Int8(min_numel=1))):
        model = network()
        before = [param.detach().clone() for param in model.parameters()]
        optimizer = distributed(model, lr=1.0, compression=compression)
        loss_of(model(batches(1)[0])).backward()
        own = [param.grad.clone() for param in model.parameters()]
        optimizer.step()
        for param, start, grad in zip(model.parameters(), before, own, strict=True):
            mean = torch.from_numpy(np.mean(WORLD.allgather(grad.numpy()), 0))
            found = start - param.detach()
            assert (found - mean).abs().max() <= 0.01 * mean.abs().max() + 1e-6
        assert_equal_everywhere(model.parameters())
    model = network()
    for options, message in (
        ({"compression": "int9"}, "'int9', expected .*, fp16 or bf16, one of fp16"),
        ({"compression": "dgc"}, "momentum twice"),
    ):
        with pytest.raises(ValueError, match=message):
            hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def check_a_rank_without_gradients_takes_part_with_zeros():
    hvd.init()
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    optimizer = distributed(model, lr=1.0)
    for _ in range(2):
        if RANK == 0:
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(model.weight, torch.full((1, 2), 1.0 - 2 / SIZE))


def check_what_scripts_do_that_horovod_did_not_expect():
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
        assert weight.grad.item() == SIZE
    closure = r"step\(closure\) was called with DistributedOptimizer\(op=Sum\)"
    with pytest.raises(ValueError, match=closure):
        optimizer.step(lambda: 0.0)
    pair = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(2)])
    plains = [torch.optim.SGD([param], lr=1.0) for param in pair]
    each = [hvd.DistributedOptimizer(one, pair.named_parameters(), op=hvd.Sum) for one in plains]
    (pair[0] + pair[1]).sum().backward()
    for one in each:
        one.step()
    assert [param.item() for param in pair] == [-SIZE] * 2
    plain = torch.zeros(1, requires_grad=True)  # no Parameter
    by_hand = hvd.DistributedOptimizer(torch.optim.SGD([plain], lr=1.0), [("plain", plain)])
    plain.sum().backward()
    by_hand.step()
    assert plain.item() == -1
    (plain.grad,) = torch.autograd.grad((plain * (RANK + 1)).sum(), plain)
    by_hand.step()
    assert plain.item() == pytest.approx(-1 - (SIZE + 1) / 2)
    hvd.broadcast_parameters([tensor := torch.full((2, 3), RANK + 1.0)], 0)
    assert tensor.eq(1).all()
    rows, received = hvd.synchronize(hvd.alltoall_async(torch.arange(SIZE) + 10 * RANK))
    assert rows.tolist() == [10 * rank + RANK for rank in range(SIZE)]
    assert received.tolist() == [1] * SIZE
    mismatch = r"parameter weight: rank 0: float32 \(2, 3\) on cpu; rank 1: "
    with pytest.raises(ModelMismatchError, match=mismatch):
        distributed(nn.Linear(3, 2 + RANK))
    hvd.shutdown()
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="was shut down"):
            plain.sum().backward()
