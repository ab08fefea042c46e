"""``ring_sharded`` on real ranks gives the numbers of optimizers that step whole parameters."""

from __future__ import annotations

import copy
import functools
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.optim import SGD, AdamW

from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.optim import LAMB, LARS, exclude_bias_and_norm
from tests.checks.marks import by_world_size
from tests.checks.models import RANK, Classifier, assert_all_ranks_equal, fit, parameters
from tests.checks.sharded.references import With, assert_same, both, make_sgd, sharded
from tests.strategies import ring

OPTIMIZERS = [  # the others: tests/sharded
    ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adagrad", {"lr": 0.01, "initial_accumulator_value": 0.1}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "foreach": True}),
    ("Adam", {"lr": 0.01, "foreach": False}),
]


def check_equals_whole_optimizers() -> None:
    for name, kwargs in OPTIMIZERS:
        kind = getattr(torch.optim, name)
        make = functools.partial(
            With, lambda m, kind=kind, kwargs=kwargs: kind(m.parameters(), **kwargs)
        )
        assert_same(*both(make, max_epochs=1))


def check_fused_and_trust_ratio_optimizers_equal_whole_ones() -> None:
    def fused(module: nn.Module) -> Any:
        return AdamW(module.parameters(), lr=0.01, fused=True)

    def lars(module: nn.Module) -> Any:
        return LARS(exclude_bias_and_norm(module, weight_decay=0.01), lr=0.5)

    def lamb(module: nn.Module) -> Any:
        return LAMB(exclude_bias_and_norm(module, weight_decay=0.01), lr=0.01, max_grad_norm=0.05)

    for make in (fused, lars, lamb):
        assert_same(*both(functools.partial(With, make)), 2e-6)


def check_groups_schedules_and_clipping_by_value_equal_whole_ones() -> None:
    def make(module: Classifier) -> Any:
        first, last = module.net[0], module.net[-1]
        groups = [
            {"params": [first.weight, last.bias], "lr": 0.1, "weight_decay": 0.1},
            {"params": [first.bias, last.weight], "lr": 0.001},
        ]
        optimizer = AdamW(groups)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}
        ]

    clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    assert_same(*both(functools.partial(With, make), accumulate_grad_batches=2, **clipping))


@by_world_size
def check_clipping_by_norm_is_global() -> None:
    make = functools.partial(With, lambda m: SGD(m.parameters(), lr=0.5, momentum=0.9))
    mine, reference = both(make, gradient_clip_val=0.05)
    assert_same(mine, reference, 1e-6)

    class ByHand(With):
        def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
            before = self.trainer.strategy.clip_grad_norm_(self.parameters(), 0.05)
            norms.append(float(before))

    norms: list[float] = []
    by_hand, _ = both(functools.partial(ByHand, make.args[0]), max_epochs=1)
    half = len(norms) // 2
    assert norms[:half] == pytest.approx(norms[half:], rel=1e-6)
    assert max(norms) > 0.05  # something was clipped
    assert_all_ranks_equal(parameters(by_hand))


def check_a_read_of_a_gradient_is_an_error() -> None:
    class Manual(Classifier):
        def __init__(self, use: Any) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.use = use

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.use(self)
            optimizer.step()

    class Logging(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grad_norm(self, 2)

    def surgery(module: Any) -> None:
        """As PCGrad: gradients of two losses, kept by reference."""
        kept = [p.grad for p in module.parameters()]
        module.zero_grad()
        module.manual_backward(module.net(torch.ones(2, 8)).square().mean())
        sum((p.grad * before).sum() for p, before in zip(module.parameters(), kept, strict=True))

    reads = (
        lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1),
        lambda module: torch.nn.utils.get_total_norm([p.grad for p in module.parameters()]),
        lambda module: [p.data.add_(p.grad, alpha=-0.1) for p in module.parameters()],
        surgery,
    )
    for module in (*map(Manual, reads), Logging()):
        with pytest.raises(
            RingError, match=r"was called with net.*\.grad.*clip_grad_norm_\(parameters, max_norm\)"
        ):
            fit(sharded(), module, max_epochs=1)

    def right(module: Any) -> None:
        before = float(module.trainer.strategy.clip_grad_norm_(module.parameters(), float("inf")))
        module.clip_gradients(module.optimizers(), gradient_clip_val=0.1)
        after = float(module.trainer.strategy.clip_grad_norm_(module.parameters(), float("inf")))
        assert after == pytest.approx(min(before, 0.1), rel=1e-4)

    fit(sharded(), Manual(right), max_epochs=1)


def check_loss_scaling_skips_the_same_steps() -> None:
    class Overflowing(With):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            # the last layer's bias alone overflows, which lies in one rank's shard
            return (
                loss + (self.net[-1].bias * 1e38).sum() * 1e10
                if batch_idx == 1 and RANK == 0
                else loss
            )

    def plugin() -> MixedPrecision:
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
        plugins.append(MixedPrecision("16-mixed", "cpu", scaler=scaler))
        return plugins[-1]

    plugins: list[MixedPrecision] = []
    make = functools.partial(Overflowing, lambda m: AdamW(m.parameters(), lr=0.01))
    mine, reference = both(make, plugins=plugin, gradient_clip_val=0.5, max_epochs=1)
    assert torch.isfinite(parameters(mine)).all()
    scales = [plugin.scaler.get_scale() for plugin in plugins]
    assert scales[0] == scales[1]
    assert_same(mine, reference, 1e-6)


def check_double_precision_and_bf16_equal_whole_ones() -> None:
    make = functools.partial(With, lambda m: AdamW(m.parameters(), lr=0.01))
    for precision in ("64-true", "bf16-mixed"):
        assert_same(*both(make, precision=precision, max_epochs=1))


def check_manual_optimization_of_a_gan_equals_whole_ones() -> None:
    class Gan(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer, which in zip(self.optimizers(), (0, 1), strict=True):
                self.toggle_optimizer(optimizer)
                fake = self.generator(batch[0])
                optimizer.zero_grad(set_to_none=batch_idx % 2 == 0)
                # two backwards before the step; the second one adds to averages
                for part in (0.25, 0.75):
                    loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
                    loss = part * (loss if which == 0 else -self.critic(fake).mean())
                    self.manual_backward(loss, retain_graph=True)
                    # the average, before a backward adds to it
                    self.clip_gradients(optimizer, gradient_clip_val=0.1)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [
                AdamW(self.critic.parameters(), lr=0.01),
                SGD(self.generator.parameters(), lr=0.1, momentum=0.9),
            ]

    assert_same(*both(Gan, max_epochs=1), 1e-6)


class Thawing(Callback):
    """Freezes the first layer and thaws it after two batches; freezes the last one after four."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.net[0].requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group(
                {"params": list(module.net[0].parameters()), "lr": 0.02}
            )
        if batch_idx == 4:
            module.net[-1].requires_grad_(False)


def check_frozen_and_thawed_parameters_and_an_average_equal_whole_ones() -> None:
    averages: list[EMAWeightAveraging] = []

    def callbacks() -> list[Callback]:
        averages.append(EMAWeightAveraging(decay=0.5))
        return [Thawing(), averages[-1]]

    make = functools.partial(
        With, lambda m: AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01)
    )
    assert_same(*both(make, max_epochs=1, callbacks=callbacks))
    assert_same(*(average._average_model for average in averages))


def check_optimizers_that_look_at_whole_tensors_are_refused() -> None:
    def lbfgs(module: nn.Module) -> Any:
        return torch.optim.LBFGS(module.parameters())

    def adafactor(module: nn.Module) -> Any:
        return torch.optim.Adafactor(module.parameters())

    for make, name in ((lbfgs, "LBFGS"), (adafactor, "Adafactor")):
        with pytest.raises(ConfigurationError, match=f"{name} cannot be sharded.*strategy='ring'"):
            fit(sharded(), With(make), max_epochs=1)


def check_parts_on_a_short_wire_equal_whole_ones() -> None:
    def run(is_sharded: bool) -> Any:
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


def check_using_the_state_between_steps_is_an_error_and_changes_nothing() -> None:
    class Curious(With):
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            if not self.trainer.strategy.algorithm.sharded:
                return
            for read in (
                lambda: optimizer.state[next(self.parameters())],
                lambda: optimizer.state.get(next(self.parameters())),
                lambda: list(optimizer.state.values()),
                lambda: copy.deepcopy(optimizer),
            ):
                with pytest.raises(
                    ConfigurationError, match=r"AdamW.state was used.*optimizer_state"
                ):
                    read()

    make = functools.partial(Curious, lambda m: AdamW(m.parameters(), lr=0.01))
    assert_same(*both(make, max_epochs=1))


def check_optimizers_set_or_built_in_the_middle_of_a_training_are_sharded() -> None:
    class Switching(With):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.make = make_sgd
                self.trainer.optimizers = [self.configure_optimizers()]

    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self) -> None:
            return None

        def on_train_start(self) -> None:
            self.own = AdamW(self.parameters(), lr=0.01)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.own.zero_grad()
            self.manual_backward(self.loss(batch))
            self.own.step()

    assert_same(*both(functools.partial(Switching, lambda m: AdamW(m.parameters(), lr=0.01))))
    assert_same(*both(Own, max_epochs=1))


def check_gradients_given_by_the_user_are_put_into_their_own_place() -> None:
    class Scalars(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (
                nn.Parameter(torch.tensor(1.0)),
                nn.Parameter(torch.tensor(1.0)),
            )

        def loss(self, batch: Any) -> torch.Tensor:
            return super().loss(batch) * self.first - (batch[0] * self.second).sin().mean()

        def on_after_backward(self) -> None:
            for param in self.parameters():
                param.grad = param.grad * 0.5

    assert_same(*both(Scalars, max_epochs=1))


def check_other_holders_of_a_parameters_memory_see_new_values() -> None:
    """As `ModelPruning` makes them with lottery tickets: ``param.data = original.data``."""

    class Holding(Classifier):
        def on_train_start(self) -> None:
            self.aliases = [p.data for p in self.parameters()]

        def on_train_batch_end(self, _: Any, batch: Any, batch_idx: int) -> None:
            sums.append(sum(alias.double().sum().item() for alias in self.aliases))
            if batch_idx == 2:
                self.aliases = [torch.ones_like(p) for p in self.parameters()]
                for param, alias in zip(self.parameters(), self.aliases, strict=True):
                    param.data = alias

    sums: list[float] = []
    assert_same(*both(Holding, max_epochs=1))
    half = len(sums) // 2
    assert sums[:half] == sums[half:]


def check_tensors_in_the_same_memory_are_refused() -> None:
    class Alias(Classifier):
        def __init__(self, kind: str) -> None:
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
        with pytest.raises(
            ConfigurationError, match=f"{names} are two tensors in the same memory.*strategy='ring'"
        ):
            fit(sharded(), Alias(kind), max_epochs=1)
