"""``ring_sharded`` on real ranks gives the numbers of optimizers that step whole parameters."""

import copy
import functools

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim import SGD, AdamW

from lightning_ring.errors import RingError
from lightning_ring.optim import LAMB
from tests.checks.marks import by_world_size
from tests.checks.models import Classifier, assert_all_ranks_equal, fit, parameters
from tests.checks.sharded.references import With, assert_same, both, sharded
from tests.refusals import refused
from tests.strategies import ring


@by_world_size
def check_a_norm_clipped_by_hand_is_that_of_all_shards():
    make = functools.partial(With, lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))

    class ByHand(With):
        def configure_gradient_clipping(self, *_, **__):
            before = self.trainer.strategy.clip_grad_norm_(self.parameters(), 0.05)
            norms.append(float(before))

    norms = []
    by_hand, _ = both(functools.partial(ByHand, make.args[0]), max_epochs=1)
    half = len(norms) // 2
    assert norms[:half] == pytest.approx(norms[half:], rel=1e-6)
    assert max(norms) > 0.05  # something was clipped
    assert_all_ranks_equal(parameters(by_hand))


def check_a_read_of_a_gradient_is_an_error():
    class Manual(Classifier):
        def __init__(self, use):
            super().__init__()
            self.automatic_optimization = False
            self.use = use

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.use(self)
            optimizer.step()

    class Logging(Classifier):
        def on_before_optimizer_step(self, optimizer):
            grad_norm(self, 2)

    with pytest.raises(
        RingError, match=r"was called with net.*\.grad.*clip_grad_norm_\(parameters, max_norm\)"
    ):
        fit(sharded(), Logging(), max_epochs=1)

    def right(module):
        before = float(module.trainer.strategy.clip_grad_norm_(module.parameters(), float("inf")))
        module.clip_gradients(module.optimizers(), gradient_clip_val=0.1)
        after = float(module.trainer.strategy.clip_grad_norm_(module.parameters(), float("inf")))
        assert after == pytest.approx(min(before, 0.1), rel=1e-4)

    fit(sharded(), Manual(right), max_epochs=1)


def check_parts_on_a_short_wire_equal_whole_ones():
    def run(is_sharded):
        L.seed_everything(7, verbose=False)
        module = With(lambda m: LAMB(m.parameters(), lr=0.01))
        strategy = ring(is_sharded, bucket_cap_mb=0.0005, compression="bf16")
        run = fit(strategy, module)
        if is_sharded:
            assert strategy.algorithm._parameters.buckets  # parts were stepped in the end
            ratios = run.optimizers[0].trust_ratios
            assert torch.isfinite(ratios).all()
            assert ratios.shape == (4,)
        return module

    assert_same(run(True), run(False), 1e-6)


def check_using_the_state_between_steps_is_an_error_and_changes_nothing():
    class Curious(With):
        def on_train_batch_end(self, *_):
            optimizer = self.trainer.optimizers[0]
            if not self.trainer.strategy.algorithm.sharded:
                return
            for read in (
                lambda: optimizer.state[next(self.parameters())],
                lambda: optimizer.state.get(next(self.parameters())),
                lambda: list(optimizer.state.values()),
                lambda: copy.deepcopy(optimizer),
            ):
                with refused(r"AdamW.state was used.*optimizer_state"):
                    read()

    make = functools.partial(Curious, lambda m: AdamW(m.parameters(), lr=0.01))
    assert_same(*both(make, max_epochs=1))


def check_an_optimizer_built_at_train_start_is_sharded():
    class Own(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return None

        def on_train_start(self):
            self.own = AdamW(self.parameters(), lr=0.01)

        def training_step(self, batch, batch_idx):
            self.own.zero_grad()
            self.manual_backward(self.loss(batch))
            self.own.step()

    assert_same(*both(Own, max_epochs=1))


def check_other_holders_of_a_parameters_memory_see_new_values():
    """As `ModelPruning` makes them with lottery tickets: ``param.data = original.data``."""

    class Holding(Classifier):
        def on_train_start(self):
            self.aliases = [p.data for p in self.parameters()]

        def on_train_batch_end(self, _, batch, batch_idx):
            sums.append(sum(alias.double().sum().item() for alias in self.aliases))
            if batch_idx == 2:
                self.aliases = [torch.ones_like(p) for p in self.parameters()]
                for param, alias in zip(self.parameters(), self.aliases, strict=True):
                    param.data = alias

    sums = []
    assert_same(*both(Holding, max_epochs=1))
    half = len(sums) // 2
    assert sums[:half] == sums[half:]


def check_tensors_in_the_same_memory_are_refused():
    class Alias(Classifier):
        def __init__(self, kind):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
            if kind == "parameter":
                self.net[1].weight.data = self.net[0].weight.data
            else:
                self.register_buffer("bias", self.net[0].bias.detach()[2:])

    for kind, names in (
        ("parameter", "net.0.weight and net.1.weight"),
        ("buffer", "net.0.bias and bias"),
    ):
        with refused(f"{names} are two tensors in the same memory.*strategy='ring'"):
            fit(sharded(), Alias(kind), max_epochs=1)
