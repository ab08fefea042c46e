"""Ranks with different numbers of batches: an error on every rank, or `uneven="join"`."""

import copy

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset

from lightning_ring import RingStrategy
from lightning_ring.errors import UnevenBatchesError
from tests.checks.marks import by_world_size
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    data,
    fit,
    parameters,
    relative_difference,
)
from tests.checks.strategy.references import one_process
from tests.refusals import refused

UNSAMPLED = {"use_distributed_sampler": False}


def _uneven_loader():
    """The last rank has two batches fewer than the others."""
    num = 16 if RANK == SIZE - 1 else 24
    return DataLoader(Subset(data(), range(RANK * 4, RANK * 4 + num)), batch_size=4)


@by_world_size
def check_uneven_batches_are_an_error_on_every_rank():
    with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} has 4.*step 4"):
        fit("ring", Classifier(), _uneven_loader(), **UNSAMPLED)
    # training that ends before anybody runs out is nobody's error
    fit("ring", Classifier(), _uneven_loader(), **UNSAMPLED, max_steps=4, max_epochs=1)
    fit("ring", Classifier(), _uneven_loader(), **UNSAMPLED, limit_train_batches=3)


class _Stream(IterableDataset):
    """Of as many rows as `_uneven_loader` has, or of ``num`` on all ranks."""

    def __init__(self, num=0):
        self.rows = [data()[i] for i in range(num or (16 if RANK == SIZE - 1 else 24))]

    def __iter__(self):
        return iter(self.rows)


class _Promising(_Stream):
    """It ends before its length."""

    def __len__(self):
        return 24


@by_world_size
def check_uneven_streams_are_an_error_at_the_step():
    for stream in (_Stream(), _Promising()):
        with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} ran out .*step 4"):
            fit("ring", Classifier(), DataLoader(stream, batch_size=4))


@by_world_size
def check_join_goes_on_with_the_ranks_that_have_data():
    for train in (
        _uneven_loader(),
        DataLoader(_Stream(), batch_size=4),
    ):
        L.seed_everything(3, verbose=False)
        module = Classifier().double()
        whole = copy.deepcopy(module)
        run = fit(
            RingStrategy(uneven="join"),
            module,
            train,
            **UNSAMPLED,
            max_epochs=1,
            precision="64-true",
        )
        assert run.global_step == 6
        rows = WORLD.allgather(module.seen["index"])
        assert [len(rank) for rank in rows] == [6] * SIZE
        rows[-1] = rows[-1][:4]  # the last two repeat its last batch and count nowhere
        xs, ys, _ = data().tensors
        steps = [[i for rank in rows if step < len(rank) for i in rank[step]] for step in range(6)]
        one_process(whole, [[xs[row].double(), ys[row]] for row in steps], lr=0.1, momentum=0.9)
        assert relative_difference(parameters(module), parameters(whole)) < 1e-12
        assert_all_ranks_equal(parameters(module))
        losses = WORLD.allgather(module.seen["loss"])
        counted = [
            loss for rank, own in enumerate(losses) for loss in own[: 6 if rank < SIZE - 1 else 4]
        ]
        torch.testing.assert_close(
            run.callback_metrics["loss_epoch"].double(), torch.stack(counted).mean()
        )


@by_world_size
def check_join_counts_no_metric_twice_and_allows_inner_gradients():
    from torchmetrics import SumMetric

    class Penalised(Classifier):
        def __init__(self):
            super().__init__()
            self.batches = SumMetric()

        def training_step(self, batch, batch_idx):
            self.batches.update(1.0)
            self.log("batches", self.batches, on_epoch=True)
            x = batch[0].clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return self.loss(batch) + slope.square().mean()

    module = Penalised()
    run = fit(RingStrategy(uneven="join"), module, _uneven_loader(), **UNSAMPLED, max_epochs=1)
    assert run.callback_metrics["batches"] == 6 * SIZE - 2
    assert_all_ranks_equal(parameters(module))


@by_world_size
def check_join_takes_part_in_collectives_inside_backward():
    class Gathering(Classifier):
        def training_step(self, batch, batch_idx):
            return self.all_gather(self.loss(batch), sync_grads=True).mean()

    for accumulate in (1, 2):
        module = Gathering(batch_norm=True)
        run = fit(
            RingStrategy(uneven="join"),
            module,
            _uneven_loader(),
            **UNSAMPLED,
            accumulate_grad_batches=accumulate,
        )
        assert run.global_step == 12 // accumulate
        assert_all_ranks_equal(parameters(module))


def check_a_stream_behind_an_iterator():
    class Fetching(Classifier):
        def training_step(self, dataloader_iter):
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    module = Fetching()
    run = fit("ring", module, DataLoader(_Stream(24), batch_size=4))
    assert run.current_epoch == 2
    assert_all_ranks_equal(parameters(module))
    assert not run.strategy._job.watch._reported, "the end of the data was reported as a failure"
    with refused("dataloader_iter"):
        fit(RingStrategy(uneven="join"), Fetching(), _uneven_loader(), **UNSAMPLED)


def check_join_refuses_manual_optimization():
    module = Classifier()
    module.automatic_optimization = False
    with refused("manual optimization"):
        fit(RingStrategy(uneven="join"), module, _uneven_loader(), **UNSAMPLED)
