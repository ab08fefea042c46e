"""Adasum, beside its definition in NumPy."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import lightning_ring.horovod as hvd
from tests.checks.horovod.world import RANK, SIZE, WORLD, assert_equal_everywhere
from tests.checks.loops import batches, loss_of, network


def adasum(vectors: list[Any]) -> Any:
    """Of the ranks' vectors, in NumPy: lower ranks with upper ones, in pairs, then pairs of
    pairs.
    """
    if len(vectors) == 1:
        return vectors[0]
    pairs = []
    for a, b in zip(vectors[::2], vectors[1::2], strict=True):
        own, other = (1 - np.dot(a, b) / (2 * np.dot(x, x)) if np.any(x) else 1.0 for x in (a, b))
        pairs.append(own * a + other * b)
    return adasum(pairs)


def check_adasum_equals_its_definition() -> None:
    hvd.init()
    random = np.random.default_rng(0)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-2)):
        for numel in (1, 2, 7, 300_000):
            vectors = list(random.standard_normal((SIZE, numel)))
            vectors[1] = vectors[0] * 2 + vectors[1] / 10  # almost parallel
            if numel == 2:
                vectors[0] *= 0
            found = hvd.allreduce(torch.tensor(vectors[RANK]).to(dtype), op=hvd.Adasum)
            expected = adasum(vectors)
            np.testing.assert_allclose(found.double(), expected, rtol=tolerance, atol=3 * tolerance)
            assert_equal_everywhere([found])
    shapes = [(3, 2), (0,), (), (5,), (1,), (4, 4)]
    group = [[random.standard_normal(shape) for _ in range(SIZE)] for shape in shapes]
    mine = [torch.tensor(ranks[RANK]) for ranks in group]
    found = hvd.grouped_allreduce(mine, op=hvd.Adasum, prescale_factor=2.0)
    for one, ranks in zip(found, group, strict=True):  # each tensor by itself
        expected = adasum([2 * vector.flatten() for vector in ranks])
        np.testing.assert_allclose(one.flatten(), expected, rtol=1e-12)
    equal = torch.arange(4.0)
    assert torch.equal(hvd.allreduce(equal, op=hvd.Adasum), equal)
    orthogonal = torch.eye(SIZE)[RANK].contiguous()
    assert torch.equal(hvd.allreduce_(orthogonal, op=hvd.Adasum), torch.ones(SIZE))
    if SIZE > 2:
        three = hvd.add_process_set([0, 1, 2])
        with pytest.raises(NotImplementedError, match="needs a power of two of them; there are 3"):
            hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=three)
        hvd.remove_process_set(three)


def check_the_optimizer_combines_steps_by_adasum() -> None:
    hvd.init()
    model = network().double()
    references = [copy.deepcopy(model) for _ in range(SIZE)]
    own, *others = (torch.optim.Adam(one.parameters(), lr=0.1) for one in (model, *references))
    optimizer = hvd.DistributedOptimizer(
        own, model.named_parameters(), backward_passes_per_step=2, op=hvd.Adasum
    )
    everyones: list[Any] = WORLD.allgather([batch.double() for batch in batches(6)])
    trained = list(zip([model, *references], [optimizer, *others], strict=True))
    for step in range(3):
        starts = [param.detach().clone() for param in model.parameters()]
        for (net, one), loader in zip(trained, [everyones[RANK], *everyones], strict=True):
            one.zero_grad()
            for inputs in loader[2 * step : 2 * step + 2]:
                loss_of(net(inputs)).backward()
            one.step()
        params = zip(*(net.parameters() for net, _ in trained), strict=True)
        for start, (found, *ranks) in zip(starts, params, strict=True):
            deltas = [(param.detach() - start).flatten().numpy() for param in ranks]
            after = start.flatten().numpy() + adasum(deltas)
            np.testing.assert_allclose(found.detach().flatten(), after, rtol=1e-10, atol=1e-12)
            for param in ranks:
                param.data.copy_(torch.tensor(after).view_as(param))
    with pytest.raises(AssertionError, match="Skipping synchronization is not supported"):
        optimizer.skip_synchronize()
    optimizer.synchronize()
