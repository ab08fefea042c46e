"""Arguments of an elastic strategy, what it refuses by name, and learning rates for other
numbers of ranks.
"""

import pickle
import warnings
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import MagicMock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from lightning_ring import ElasticStrategy, RingStrategy
from lightning_ring.data import ShuffledSampler
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.checks import check_batches, check_fit
from lightning_ring.integrations.lightning.elastic.loops import (
    change_loops,
    warn_of_fixed_samplers,
    with_ordered_sampler,
)
from lightning_ring.integrations.lightning.elastic.resize import Resize, scale_learning_rates
from lightning_ring.monitor import RingMonitor, RingProfile
from tests.job.test_launchers import TORCHRUN


def test_its_own_arguments_are_its_alone():
    strategy = ElasticStrategy(min_ranks=2, resize_lr="sqrt", backend="gloo")
    assert (strategy.min_ranks, strategy.resize_lr) == (2, "sqrt")
    assert (strategy.options.backend, strategy.options.monitor) == ("gloo", True)
    for gone in ("elastic", "min_ranks", "shard_optimizer"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{gone}'"):
            RingStrategy(**{gone: 1})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"min_ranks": 0}, "min_ranks=0"),
        ({"resize_lr": "square"}, "resize_lr='square'"),
        ({"wait_for_ranks": 5}, "wait_for_ranks=5"),
        ({"compression": "powersgd"}, "rounding errors"),
        (
            {"uneven": "join", "force_communication": True},
            "uneven='join', force_communication=True",
        ),
        ({"start_method": "fork"}, "start_method='fork'"),
    ],
)
def test_what_cannot_work_is_named(arguments, named):
    with pytest.raises(ConfigurationError, match=named.replace("(", r"\(")):
        ElasticStrategy(**arguments)


def test_launchers_that_end_all_ranks_are_refused_before_anything_opens(monkeypatch):
    rank_0 = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0")
    for name, value in (TORCHRUN | rank_0 | {"MASTER_ADDR": "::1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="ringrun"):
        pl.Trainer(strategy="ring_elastic", accelerator="cpu", logger=False)


def test_a_fit_that_cannot_be_elastic_is_refused_with_all_reasons():
    finders = LearningRateFinder(), BatchSizeFinder()
    trainer = MagicMock(
        callbacks=[RingMonitor(), RingProfile("profile.json"), *finders],
        optimizers=[torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])],
        reload_dataloaders_every_n_epochs=1,
        overfit_batches=0.0,
        lightning_module=pl.LightningModule(),
    )
    trainer.lightning_module.automatic_optimization = False
    trainer.precision_plugin.scaler = None
    with pytest.raises(ConfigurationError) as caught:
        check_fit(trainer)
    together = "manual optimization and a sharded algorithm together"
    refused = {"RingProfile", "LearningRateFinder", "BatchSizeFinder", together, "LBFGS"}
    refused |= {"reload_dataloaders_every_n_epochs"}
    named = {name for name in (*refused, "scaler", "RingMonitor") if name in str(caught.value)}
    assert named == refused


def test_batches_of_different_sizes_are_an_error_of_every_rank():
    check_batches([16, 16, 16])
    with pytest.raises(ConfigurationError, match=r"different sizes: \[16, 16, 12\], by rank"):
        check_batches([16, 16, 12])


def test_lightnings_sampler_is_replaced_with_the_same_settings():
    data = TensorDataset(torch.arange(10))
    theirs = DistributedSampler(data, num_replicas=2, rank=1, shuffle=False, seed=7, drop_last=True)
    loader = with_ordered_sampler(DataLoader(data, batch_size=3, sampler=theirs, drop_last=True))
    assert isinstance(loader.sampler, ShuffledSampler)
    sampler = loader.sampler
    assert (sampler.shuffle, sampler.seed, sampler.remainder) == (False, 7, "drop")
    assert loader.batch_size == 3
    own = DataLoader(data, sampler=SequentialSampler(data))
    assert with_ordered_sampler(own) is own


@pytest.fixture
def fixed():
    data = TensorDataset(torch.arange(12))
    sampler = DistributedSampler(data, num_replicas=3, rank=2, shuffle=False)
    return DataLoader(data, sampler=sampler)


def test_validation_loaders_that_are_cut_for_other_ranks_are_named(fixed):
    loaders = [DataLoader(fixed.dataset), fixed]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_fixed_samplers(loaders, 2, 3)
    for size in (2, 3):
        with pytest.warns(UserWarning, match=rf"loader 1 of rank 1 of {size} .* of rank 2 of 3"):
            warn_of_fixed_samplers(loaders, 1, size)


@pytest.mark.parametrize("generation", [0, 1])
def test_a_validation_names_such_loaders_once_ranks_have_changed(generation, fixed):
    module = pl.LightningModule()
    strategy = MagicMock(lightning_module=module, global_rank=1, world_size=2)
    strategy.and_barrier = lambda run: run()
    strategy.fit_trainer.callbacks = []
    validation = strategy.fit_trainer.fit_loop.epoch_loop.val_loop
    validation.run = lambda: "metrics"
    validation._combined_loader.flattened = [fixed]
    fit = MagicMock()
    fit.recovery = SimpleNamespace(parted=False, view=SimpleNamespace(generation=generation))
    fit.calls.call = lambda run, take_back: run()
    with ExitStack() as in_fit, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        change_loops(strategy, fit, in_fit)
        assert validation.run() == "metrics"
    assert ["loader 0 of rank 1 of 2" in str(one.message) for one in found] == [True] * generation


def schedules(optimizer):
    return [
        lr_scheduler.StepLR(optimizer, 2, 0.5),
        lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01),
        lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lr_scheduler.OneCycleLR(optimizer, 0.4, total_steps=20),
        lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 3),
                lr_scheduler.ExponentialLR(optimizer, 0.9),
            ],
            [3],
        ),
    ]


@pytest.mark.parametrize("index", range(5))
def test_a_schedule_goes_on_with_scaled_rates(index):
    """As if the training had begun with learning rates half as high."""
    rates = []
    for late in (True, False):
        optimizer = one_parameter()
        scheduler = schedules(optimizer)[index]
        if not late:
            scale_learning_rates([optimizer], [scheduler], 0.5)
        for step in range(8):
            optimizer.step()
            scheduler.step()
            if late and step == 3:
                scale_learning_rates([optimizer], [scheduler], 0.5)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == pytest.approx(rates[1])


POSITION = SimpleNamespace(batch_size=8)


def one_parameter(**options):
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], **{"lr": 0.2} | options)


def strategy_of(optimizer, *schedulers, accumulate=1, ranks=3):
    return SimpleNamespace(
        optimizers=[optimizer],
        lr_scheduler_configs=[SimpleNamespace(scheduler=one) for one in schedulers],
        fit_trainer=SimpleNamespace(accumulate_grad_batches=accumulate),
        world_size=ranks,
    )


def resize_after(ranks, rule):
    resize = Resize(rule)
    resize.finish_step(ranks)
    return resize


@pytest.mark.parametrize("within", [False, True])
def test_one_cycle_stays_at_its_end_where_fewer_ranks_take_more_steps(within):
    """torch's raises behind total_steps, and would end a job that has outlived a death."""
    rates = []
    for steps in (19, 30):
        optimizer = one_parameter(momentum=0.9)
        scheduler = lr_scheduler.OneCycleLR(
            optimizer, 0.4, total_steps=20, anneal_strategy="linear"
        )
        if within:
            scheduler = lr_scheduler.ChainedScheduler([scheduler])
        resize_after(4, "keep").apply(strategy_of(optimizer, scheduler), POSITION, 0)
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
        rates.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        pickle.dumps(scheduler.state_dict())
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(0.4 / 25 / 1e4)


def test_a_rate_that_groups_share_as_a_tensor_is_scaled_once():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=torch.tensor(0.2))
    scale_learning_rates([optimizer], [], 0.5)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.1, 0.1])


def test_rates_of_stochastic_weight_averaging_are_scaled():
    optimizer = one_parameter()
    scheduler = SWALR(optimizer, swa_lr=0.1, anneal_epochs=1)
    scale_learning_rates([optimizer], [scheduler], 0.5)
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("keep", 0.2), ("linear", 0.15), ("sqrt", 0.2 * 0.75**0.5), (lambda old, new: 0.5, 0.1)],
)
def test_rates_follow_the_number_of_ranks_and_the_change_is_said(rule, expected, caplog):
    strategy = strategy_of(optimizer := one_parameter(), accumulate=2, ranks=4)
    resize = resize_after(4, rule)
    resize.apply(strategy, POSITION, 1)
    assert not caplog.records
    strategy.world_size = 3
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        resize.apply(strategy, POSITION, 120)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    rates = "0.2" if rule == "keep" else f"0.2 -> {expected:g}"
    assert f"48 samples instead of 64, learning rate {rates} (" in caplog.text


def test_rates_are_scaled_from_those_of_the_last_finished_step():
    """The first rank tried the step over six ranks too, and the second over five alone. A factor
    of each change would give them other bits."""
    rates = []
    for tried in ([6, 5], [5]):
        optimizer = one_parameter(lr=0.1)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 10, eta_min=0.01)
        strategy = strategy_of(optimizer, scheduler)
        resize = resize_after(7, lambda old, new: new / old / 3)
        for strategy.world_size in tried:
            resize.apply(strategy, POSITION, 1)
        resize.finish_step(5)
        strategy.world_size = 4
        resize.apply(strategy, POSITION, 2)
        rates.append((optimizer.param_groups[0]["lr"], scheduler.eta_min, scheduler.base_lrs))
    assert rates[0] == rates[1]
    assert rates[0][0] == pytest.approx(0.1 * (5 / 7 / 3) * (4 / 5 / 3))


def test_a_function_that_returns_no_factor_is_an_error():
    resize, strategy = resize_after(4, lambda old, new: 0.0), strategy_of(one_parameter())
    with pytest.raises(ConfigurationError, match=r"returned 0\.0 for 4 and 3 ranks"):
        resize.apply(strategy, POSITION, 0)
