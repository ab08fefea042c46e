"""`RingStrategy` on real ranks gives the numbers of Lightning's DDP and of one process on the
whole batch.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_ring import RingStrategy
from tests.checks.marks import by_world_size
from tests.checks.models import (
    RANK,
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    data,
    ddp,
    fit,
    loader,
    parameters,
    relative_difference,
    trainer,
)
from tests.checks.strategy.references import (
    WORLD,
    assert_like_ddp,
    both,
    one_process,
    scaler_plugin,
)


class Convolutions(nn.Module):
    """What a ResNet is made of, once: a strided convolution, BatchNorm, and a sum of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(F.relu(x + self.branch(x)).mean((2, 3)))


@by_world_size
def check_equals_ddp_in_convolutions_with_batch_norm() -> None:
    """ResNet-18 on two ranks, whose bits are equal. (With more the order of additions differs, and
    BatchNorm over the few values of its last layers magnifies a rounding error 1e5 times.) A small
    network on any.
    """
    from torchvision.models import resnet18

    class Image(Classifier):
        def __init__(self, network: Callable[[], nn.Module]) -> None:
            super().__init__(lr=0.01)
            self.net = network()
            self.first = parameters(self)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_after_backward(self) -> None: ...

    networks: list[Any] = [(Convolutions, 20)]
    if SIZE == 2:
        networks.append((functools.partial(resnet18, num_classes=10), 2))
    for network, steps in networks:
        num = steps * SIZE * 4
        generator = torch.Generator().manual_seed(3)
        images = torch.utils.data.TensorDataset(
            torch.randn(num, 3, 32, 32, generator=generator),
            torch.randint(0, 10, (num,), generator=generator),
            torch.arange(num),
        )
        ring, reference = both(
            functools.partial(Image, network), DataLoader(images, batch_size=4), max_epochs=1
        )
        assert len(ring.seen["loss"]) == steps
        # it moved a hundred times what may differ
        assert relative_difference(parameters(ring), ring.first) > 1e-3
        assert_like_ddp(ring, reference)


@by_world_size
def check_equals_one_process_on_the_whole_batch() -> None:
    module = Classifier().double()
    whole = copy.deepcopy(module)
    fit("ring", module, max_epochs=1, precision="64-true")
    steps = 48 // (4 * SIZE)
    rows = [list(range(step * 4 * SIZE, (step + 1) * 4 * SIZE)) for step in range(steps)]
    sampler = [list(DistributedSampler(data(), SIZE, rank, shuffle=False)) for rank in range(SIZE)]
    seen = WORLD.allgather(module.seen["index"])
    rows = [[index for rank in range(SIZE) for index in seen[rank][step]] for step in range(steps)]
    assert sorted(index for row in rows for index in row) == sorted(
        index for rank in sampler for index in rank
    )
    xs, ys, _ = data().tensors
    one_process(whole, [[xs[row].double(), ys[row]] for row in rows], lr=0.1, momentum=0.9)
    assert relative_difference(parameters(module), parameters(whole)) < 1e-12


@by_world_size
def check_gradients_are_equal_in_on_after_backward() -> None:
    module = Classifier()
    fit("ring", module)
    for gradient in module.seen["gradient"]:
        assert_all_ranks_equal(gradient)


@by_world_size
def check_accumulation_clipping_and_schedules_equal_ddp() -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    assert_like_ddp(*both(Scheduled, accumulate_grad_batches=3))
    assert_like_ddp(*both(Scheduled, gradient_clip_val=0.05))
    assert_like_ddp(*both(Scheduled, gradient_clip_val=0.01, gradient_clip_algorithm="value"))


@by_world_size
def check_precisions_equal_ddp() -> None:
    for precision, tolerance in (("bf16-mixed", 1e-2), ("bf16-true", 1e-2), ("64-true", 1e-12)):
        assert_like_ddp(*both(Classifier, precision=precision), tolerance)
    assert_like_ddp(*both(Classifier, plugins=scaler_plugin))


def check_loss_scaling_skips_the_same_steps_on_all_ranks() -> None:
    class Overflowing(Classifier):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            return loss * float("inf") if RANK == 0 and len(self.seen["loss"]) == 2 else loss

    module = Overflowing()
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=16.0))
    fit("ring", module, plugins=plugin)
    assert torch.isfinite(parameters(module)).all()
    assert plugin.scaler.get_scale() == 8.0  # halved once, on every rank
    assert_all_ranks_equal(parameters(module))


@by_world_size
def check_manual_optimization_of_a_gan_equals_ddp() -> None:
    class Gan(L.LightningModule):
        def __init__(self, toggle: bool) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.toggle = toggle
            self.generator = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
            self.critic = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

        def training_step(self, batch: Any, batch_idx: int) -> None:
            generator, critic = self.optimizers()
            for optimizer, which in ((critic, 0), (generator, 1)):
                if self.toggle:
                    self.toggle_optimizer(optimizer)
                fake = self.generator(batch[0])
                loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
                optimizer.zero_grad()
                self.manual_backward(loss if which == 0 else -self.critic(fake).mean())
                self.clip_gradients(optimizer, gradient_clip_val=0.1)
                optimizer.step()
                if self.toggle:
                    self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [
                torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)
            ]

    for toggle in (True, False):
        assert_like_ddp(*both(functools.partial(Gan, toggle), ddp=ddp(find_unused_parameters=True)))


def check_a_backward_that_raises_in_manual_optimization_is_dropped() -> None:
    class Catching(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.planted = False
            self.net[0].weight.register_hook(lambda _: 1 / 0 if self.planted else None)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.planted = batch_idx in (0, 2)
            if self.planted and not isinstance(self.trainer.strategy, RingStrategy):
                return
            try:
                self.backpropagate(self.loss(batch))
            except ZeroDivisionError:
                pass
            else:
                optimizer.step()
            optimizer.zero_grad()

        def backpropagate(self, loss: Tensor) -> None:
            loss.backward()

    class Manual(Catching):
        def backpropagate(self, loss: Tensor) -> None:
            self.manual_backward(loss)

    for kind in (Catching, Manual):
        kinds = iter((kind, Manual))  # DDP does not average in a plain backward
        assert_like_ddp(*both(lambda: next(kinds)()))  # noqa: B023


def check_training_step_returning_none_on_one_rank() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if RANK == SIZE - 1 and batch_idx == 1 else self.loss(batch)

    for plugins in (None, scaler_plugin()):
        module = Skipping()
        if plugins is not None:
            plugins.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        run = fit("ring", module, plugins=plugins)
        assert run.global_step == 2 * (48 // (4 * SIZE))
        assert_all_ranks_equal(parameters(module))


def check_weight_averaging() -> None:
    def ema() -> L.Callback:
        return WeightAveraging(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9))

    def swa() -> L.Callback:
        return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)

    for make in (ema, swa):
        L.seed_everything(7, verbose=False)
        module = Classifier()
        fit("ring", module, callbacks=[make()], max_epochs=3)
        L.seed_everything(7, verbose=False)
        reference = Classifier()
        fit(ddp(), reference, callbacks=[make()], max_epochs=3)
        assert_like_ddp(module, reference)


def check_compiled_modules() -> None:
    module = Classifier()
    reference = copy.deepcopy(module)
    run = trainer("ring", max_epochs=1)
    run.fit(torch.compile(module, backend="aot_eager"), loader())
    fit("ring", reference, max_epochs=1)
    assert relative_difference(parameters(module), parameters(reference)) < 1e-6
    assert_all_ranks_equal(parameters(module))


def check_a_reduced_loss_keeps_its_gradient() -> None:
    class Reducing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.trainer.strategy.reduce(self.loss(batch) * 1.0)

    assert_like_ddp(*both(Reducing))
