"""An algorithm from outside the package trains through `RingStrategy`."""

import copy

import torch

from lightning_ring import RingStrategy
from tests.algorithms.local_sgd import LocalSGD
from tests.checks.models import (
    RANK,
    SIZE,
    WORLD,
    Classifier,
    assert_all_ranks_equal,
    fit,
    parameters,
)


def check_an_algorithm_from_outside_the_package_trains():
    module = Classifier()
    start = copy.deepcopy(module)
    strategy = RingStrategy(algorithm=LocalSGD(every=2))
    fit(strategy, module, max_epochs=1, limit_train_batches=4)
    assert strategy.algorithm.num_steps == 4
    assert_all_ranks_equal(parameters(module))
    assert not torch.equal(parameters(module), parameters(start))
    fit(RingStrategy(algorithm=LocalSGD(every=3)), module, max_epochs=1, limit_train_batches=4)
    everyones = WORLD.allgather(parameters(module).sum().item())
    assert len(set(everyones)) == SIZE, f"rank {RANK}: the fourth step is this rank's own"
