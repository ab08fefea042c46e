"""Ranks with different numbers of batches: `hvd.join`, and ranks that leave without it."""

import copy
import itertools

import pytest
import torch
from torch import nn

import lightning_ring.horovod as hvd
from lightning_ring.gradients.compression import Int8
from tests.checks.horovod.world import RANK, SIZE, assert_equal_everywhere, distributed, total
from tests.checks.loops import network

EPOCHS = [[0, 3, 1, 2], [2, 1, 2, 0]]  # batches by rank; in the first epoch rank 0 has none


def inputs_of(rank, epoch, step):
    generator = torch.Generator().manual_seed(1000 * epoch + 10 * step + rank)
    return torch.randn(4, 6, generator=generator)


def loss_of_linear(model, inputs):
    return model(inputs).square().mean()


def loss_of_embedding(model, inputs):
    return model((inputs.abs() * 3).long().clamp(max=8)).square().mean()


def join_equals_zeros(model, loss_of, *, backwards=None, tolerance=1e-5, **options):
    """Train with uneven epochs, and compare with a sum over the ranks that have a batch, divided
    by all ranks.
    """
    passes = backwards or options.get("backward_passes_per_step", 1)
    divisor = 1 if options.get("op") == hvd.Sum else SIZE
    expected = copy.deepcopy(model)
    optimizer = distributed(model, **options)
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for epoch, counts in enumerate(EPOCHS):
        counts = counts[:SIZE]
        for step in range(counts[RANK]):
            optimizer.zero_grad()
            for part in range(passes):
                loss_of(model, inputs_of(RANK, epoch, passes * step + part)).backward()
            optimizer.step()
            assert total("metric") == sum(step < count for count in counts)
        last = hvd.join()
        assert counts[last] == max(counts)
        assert hvd.allgather_object(last) == [last] * SIZE
        hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        for step in range(max(counts)):
            plain.zero_grad()
            for rank, part in itertools.product(range(SIZE), range(passes)):
                if step < counts[rank]:
                    inputs = inputs_of(rank, epoch, passes * step + part)
                    (loss_of(expected, inputs) / divisor).backward()
            plain.step()
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def check_join_takes_part_in_gradients_with_zeros():
    hvd.init()
    options = [
        {},
        {"backward_passes_per_step": 2, "op": hvd.Sum},
        {"backwards": 2},  # each of which is reduced, the second one with the first one's averages
        {"compression": hvd.Compression.fp16, "tolerance": 1e-2},
        {"compression": Int8(min_numel=1), "tolerance": 5e-2},
    ]
    for one in options:
        join_equals_zeros(network(), loss_of_linear, **one)
    for sparse_as_dense in (False, True):
        torch.manual_seed(0)
        embedding = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        for backwards in (1, 2):
            join_equals_zeros(
                embedding, loss_of_embedding, sparse_as_dense=sparse_as_dense, backwards=backwards
            )
    hvd.shutdown()


def check_an_optimizer_that_a_joined_rank_lacks_is_an_error():
    hvd.init()
    if RANK > 0:
        absent = r"needs every rank, and rank\(s\) 0 have called join"
        with pytest.raises(hvd.HorovodInternalError, match=absent):
            distributed(network())
    hvd.join()
    hvd.shutdown()


def check_gradients_of_a_rank_that_has_left_are_an_error():
    for steps_of_the_first in (0, 2):
        hvd.init()
        model = network()
        optimizer = distributed(model)
        for _ in range(steps_of_the_first):
            loss_of_linear(model, inputs_of(RANK, 0, 0)).backward()
            optimizer.step()
        if RANK == 1:
            hvd.shutdown()
        else:
            ended = "was shut down on rank 1, or the script has ended"
            with pytest.raises(hvd.HorovodInternalError, match=ended):
                loss_of_linear(model, inputs_of(RANK, 0, 0)).backward()
        hvd.init()  # meets the ranks anew
        assert total() == SIZE
        hvd.shutdown()


def check_optimizers_of_another_operation_are_an_error():
    hvd.init()
    different = "different reduce operations: rank 0 Average, rank 1 Sum"
    with pytest.raises(hvd.HorovodInternalError, match=different):
        distributed(network(), op=hvd.Sum if RANK else hvd.Average)
    hvd.shutdown()


def check_optimizers_over_process_sets_are_counted_by_set():
    hvd.init()
    models = [network(seed=seed) for seed in (0, 1)]
    some = hvd.add_process_set([0, 1]) if SIZE > 2 else hvd.global_process_set
    sets = (some, hvd.global_process_set)
    optimizers = [
        distributed(one, process_set=ranks) for one, ranks in zip(models, sets, strict=True)
    ]
    for one, optimizer in zip(models, optimizers, strict=True):
        loss_of_linear(one, inputs_of(RANK, 0, 0)).backward()
        optimizer.step()
    assert_equal_everywhere(models[1].parameters())
    hvd.shutdown()
