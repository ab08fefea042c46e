"""Checks of `RingStrategy` on real ranks, against Lightning's DDP and against one process on the whole batch."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from mpi4py import MPI
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset

from lightning_ring import RingStrategy
from lightning_ring.errors import CollectiveError, ConfigurationError, ModelMismatchError, RingError, UnevenBatchesError
from lightning_ring.gradients.compression import PowerSGD
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

WORLD = MPI.COMM_WORLD


def both(make: Any, train: Any = None, val: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """``make()`` trained under the ring and under Lightning's DDP, from the same seed."""
    modules = []
    for strategy in (RingStrategy(bucket_cap_mb=0.0005), kwargs.pop("ddp", None) or ddp()):
        L.seed_everything(7, verbose=False)
        module = make()
        arguments = {key: value() if key == "plugins" else value for key, value in kwargs.items()}
        fit(strategy, module, train, val, **arguments)
        modules.append(module)
    return modules[0], modules[1]


def assert_like_ddp(ring: Any, reference: Any, tolerance: float = 1e-5) -> None:
    """Bit for bit on two ranks; with more the order of additions differs."""
    assert_all_ranks_equal(parameters(ring))
    difference = relative_difference(parameters(ring), parameters(reference))
    assert difference == 0 if SIZE <= 2 else difference < tolerance, difference


def one_process(module: Classifier, batches: list[list[Tensor]], *, lr: float, momentum: float) -> None:
    """Train ``module`` on the concatenation of all ranks' batches, in a plain loop."""
    optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=momentum)
    for batch in batches:
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()


def check_equals_ddp_in_resnet18() -> None:
    from torchvision.models import resnet18

    class Image(Classifier):
        def __init__(self) -> None:
            # With other orders of addition (more than two ranks) a rounding error grows by 1e5 in six steps of a
            # BatchNorm over so few values, unless the steps are small; weights still move by 3e-4 in all.
            super().__init__(lr=0.01 if SIZE <= 2 else 1e-5)
            self.net = resnet18(num_classes=10)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

    steps = 20 if SIZE <= 2 else 6  # four ranks share two cores
    num = steps * SIZE * 4
    generator = torch.Generator().manual_seed(3)
    images = torch.utils.data.TensorDataset(
        torch.randn(num, 3, 32, 32, generator=generator),
        torch.randint(0, 10, (num,), generator=generator),
        torch.arange(num),
    )
    ring, reference = both(Image, DataLoader(images, batch_size=4), max_epochs=1)
    assert len(ring.seen["loss"]) == steps
    assert_like_ddp(ring, reference)


def check_equals_one_process_on_the_whole_batch() -> None:
    module = Classifier().double()
    whole = copy.deepcopy(module)
    fit("ring", module, max_epochs=1, precision="64-true")
    steps = 48 // (4 * SIZE)
    rows = [list(range(step * 4 * SIZE, (step + 1) * 4 * SIZE)) for step in range(steps)]
    sampler = [list(DistributedSampler(data(), SIZE, rank, shuffle=False)) for rank in range(SIZE)]
    seen = WORLD.allgather(module.seen["index"])
    rows = [[index for rank in range(SIZE) for index in seen[rank][step]] for step in range(steps)]
    assert sorted(index for row in rows for index in row) == sorted(index for rank in sampler for index in rank)
    xs, ys, _ = data().tensors
    one_process(whole, [[xs[row].double(), ys[row]] for row in rows], lr=0.1, momentum=0.9)
    assert relative_difference(parameters(module), parameters(whole)) < 1e-12


def check_gradients_are_equal_in_on_after_backward() -> None:
    module = Classifier()
    fit("ring", module)
    for gradient in module.seen["gradient"]:
        assert_all_ranks_equal(gradient)


def check_accumulation_clipping_and_schedules_equal_ddp() -> None:
    class Scheduled(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    assert_like_ddp(*both(Scheduled, accumulate_grad_batches=3))
    assert_like_ddp(*both(Scheduled, gradient_clip_val=0.05))
    assert_like_ddp(*both(Scheduled, gradient_clip_val=0.01, gradient_clip_algorithm="value"))


def check_precisions_equal_ddp() -> None:
    for precision, tolerance in (("bf16-mixed", 1e-2), ("bf16-true", 1e-2), ("64-true", 1e-12)):
        assert_like_ddp(*both(Classifier, precision=precision), tolerance)
    scaled = functools.partial(_scaler_plugin)
    assert_like_ddp(*both(Classifier, plugins=scaled))


def _scaler_plugin() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))


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
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.generator, self.critic)]

    for toggle in (True, False):
        assert_like_ddp(*both(functools.partial(Gan, toggle), ddp=ddp(find_unused_parameters=True)))


def check_plain_loss_backward_in_manual_optimization_is_reduced() -> None:
    class Plain(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.loss(batch).backward()
            optimizer.step()

    module = Plain()
    fit("ring", module)
    assert_all_ranks_equal(parameters(module))


def check_training_step_returning_none_on_one_rank() -> None:
    class Skipping(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if RANK == SIZE - 1 and batch_idx == 1 else self.loss(batch)

    for plugins in (None, _scaler_plugin()):
        module = Skipping()
        if plugins is not None:
            plugins.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        run = fit("ring", module, plugins=plugins)
        assert run.global_step == 2 * (48 // (4 * SIZE))
        assert_all_ranks_equal(parameters(module))


def check_buffers_follow_rank_0() -> None:
    for when in ("start", "epoch", "step"):

        class Watching(Classifier):
            def on_validation_epoch_start(self) -> None:
                self.seen["mean"].append(self.net[1].running_mean.clone())

        module = Watching(batch_norm=True)
        module.seen["mean"] = []
        fit(RingStrategy(broadcast_buffers=when), module, val=loader())
        means = WORLD.allgather(module.seen["mean"][-1].numpy().tobytes())
        assert (len(set(means)) == 1) == (when != "start" or SIZE == 1), when
        assert_all_ranks_equal(parameters(module))


def check_rank_0_weights_reach_all_before_the_first_step() -> None:
    class First(Classifier):
        def on_train_start(self) -> None:
            self.first = parameters(self)

    torch.manual_seed(RANK)  # every rank begins elsewhere
    module = First(batch_norm=True)
    expected = WORLD.bcast(parameters(module))
    fit("ring", module)
    assert torch.equal(module.first, expected)


def check_sampler_is_put_in_for_training_and_evaluation() -> None:
    module = Classifier()
    run = fit("ring", module, loader(shuffle=True), loader())
    train = WORLD.allgather(module.seen["index"])
    per_epoch = len(train[0]) // 2
    for epoch in range(2):
        rows = [
            index for rank in train for batch in rank[epoch * per_epoch : (epoch + 1) * per_epoch] for index in batch
        ]
        assert sorted(rows) == list(range(48))
    assert train[0][:per_epoch] != train[0][per_epoch:], "the second epoch is shuffled as the first: no set_epoch"
    assert sorted(i for rank in WORLD.allgather(module.seen["eval"][-per_epoch:]) for b in rank for i in b) == list(
        range(48)
    )
    predictions = run.predict(module, loader())
    assert sorted(torch.cat(WORLD.allreduce(predictions)).tolist()) == list(range(48))
    module.seen["eval"].clear()
    run.test(module, loader(), verbose=False)
    run.validate(module, loader(), verbose=False)
    assert sorted(i for rank in WORLD.allgather(module.seen["eval"]) for b in rank for i in b) == sorted(
        2 * list(range(48))
    )


def check_padding_is_said_once() -> None:
    if SIZE == 1:
        return
    with pytest.warns(UserWarning, match=r"repeats \d+ of them") if RANK == 0 else _no_warning():
        fit("ring", Classifier(), loader(num=48 * SIZE + 1), max_epochs=1)


class _no_warning:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: Any) -> None: ...


def check_sync_dist_and_all_gather() -> None:
    class Gathering(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.net(batch[0])
            gathered = self.all_gather(hidden, sync_grads=True)
            assert gathered.shape == (SIZE, *hidden.shape)
            self.log("rank", float(RANK), sync_dist=True)
            self.log("highest", float(RANK), sync_dist=True, reduce_fx="max")
            self.log("total", torch.tensor(RANK + 1), sync_dist=True, reduce_fx="sum")
            return F.cross_entropy(gathered.flatten(0, 1), self.all_gather(batch[1]).flatten())

    ring, reference = both(Gathering, max_epochs=1)
    assert_like_ddp(ring, reference)
    metrics = ring.trainer.callback_metrics
    assert metrics["rank"] == (SIZE - 1) / 2
    assert metrics["highest"] == SIZE - 1
    assert metrics["total"] == SIZE * (SIZE + 1) / 2


def check_collectives_of_the_strategy() -> None:
    module = Classifier()
    strategy = fit("ring", module, max_epochs=1)
    strategy = trainer("ring")
    seen: dict[str, Any] = {}

    class Probe(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            ring = trainer.strategy
            seen["broadcast"] = ring.broadcast({"rank": RANK}, src=SIZE - 1)
            seen["mean"] = ring.reduce(torch.tensor([RANK, 2 * RANK]), reduce_op="mean")
            seen["sum"] = ring.reduce(torch.tensor(float(RANK)), reduce_op="sum")
            seen["all"] = ring.reduce_boolean_decision(RANK == 0)
            seen["any"] = ring.reduce_boolean_decision(RANK == 0, all=False)
            ring.barrier("named")

    strategy.callbacks.append(Probe())
    strategy.fit(module, loader())
    total = SIZE * (SIZE - 1) // 2
    assert seen["broadcast"] == {"rank": SIZE - 1}
    torch.testing.assert_close(seen["mean"].float(), torch.tensor([total / SIZE, 2 * total / SIZE]))
    assert seen["sum"] == total
    assert (seen["all"], seen["any"]) == (SIZE == 1, True)


def check_stopping_on_one_rank_alone_is_an_error_on_every_rank() -> None:
    if SIZE == 1:
        return

    class Stopping(Classifier):
        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = RANK == 0

    with pytest.raises(CollectiveError, match="different collectives"):
        fit("ring", Stopping(), max_epochs=4)


def check_early_stopping_decides_alike() -> None:
    class Noisy(Classifier):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("watched", float(self.current_epoch if RANK == 0 else -self.current_epoch), sync_dist=False)

    run = fit("ring", Noisy(), val=loader(), max_epochs=6, callbacks=[EarlyStopping("watched", patience=1)])
    assert len(set(WORLD.allgather(run.current_epoch))) == 1


class _Drops(Classifier):
    """Draws random numbers in training (dropout, and in Python and NumPy), so resuming needs every rank's state."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import random

        import numpy as np

        return super().training_step(batch, batch_idx) * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


def check_resuming_equals_never_stopping(tmp_path: Path) -> None:
    def run(max_epochs: int, ckpt_path: str | None, folder: str, seed: int) -> Any:
        L.seed_everything(5, verbose=False)  # the sampler's order
        module = _Drops()
        torch.manual_seed(seed + RANK)  # each rank draws numbers of its own; the resumed run begins with others
        checkpoint = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}")
        job = trainer("ring", max_epochs=max_epochs, callbacks=[checkpoint], enable_checkpointing=True)
        job.fit(module, loader(shuffle=True), ckpt_path=ckpt_path)
        return module

    whole = run(4, None, "whole", seed=1)
    run(2, None, "half", seed=1)
    resumed = run(4, str(tmp_path / "half" / "epoch=1.ckpt"), "rest", seed=99)
    assert torch.equal(torch.stack(whole.seen["loss"][-len(resumed.seen["loss"]) :]), torch.stack(resumed.seen["loss"]))
    assert torch.equal(parameters(whole), parameters(resumed))
    assert_all_ranks_equal(parameters(resumed))


def check_checkpoint_opens_without_the_ring(tmp_path: Path) -> None:
    module = Classifier(batch_norm=True)
    run = fit("ring", module)
    path = WORLD.bcast(str(tmp_path / "plain.ckpt"))
    run.save_checkpoint(path)
    if RANK == 0:
        checkpoint = torch.load(path, weights_only=True)
        assert not any(name.startswith("module.") for name in checkpoint["state_dict"])
        assert len(checkpoint["lightning_ring"]["random_states"]) == SIZE
        fresh = Classifier(batch_norm=True)
        fresh.load_state_dict(checkpoint["state_dict"])
        assert torch.equal(parameters(fresh), parameters(module))
    WORLD.Barrier()
    again = Classifier(batch_norm=True)
    resumed = trainer(ddp(), max_epochs=3)
    resumed.fit(again, loader(), ckpt_path=path)
    assert resumed.current_epoch == 3


def check_powersgd_resumes_where_it_stopped_and_says_where_it_cannot(tmp_path: Path) -> None:
    def run(max_epochs: int, ckpt_path: str | None, folder: str, start_iter: int = 2) -> Any:
        torch.manual_seed(3)
        module = Classifier()
        checkpoint = ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}")
        strategy = RingStrategy(compression=PowerSGD(rank=1, start_iter=start_iter))
        job = trainer(strategy, max_epochs=max_epochs, callbacks=[checkpoint], enable_checkpointing=True)
        job.fit(module, loader(), ckpt_path=ckpt_path)
        return module

    whole = run(4, None, "whole")
    run(2, None, "half")
    half = str(tmp_path / "half" / "epoch=1.ckpt")
    assert torch.equal(parameters(run(4, half, "rest")), parameters(whole))
    if SIZE == 1:  # nothing travels
        return
    assert not torch.equal(parameters(run(4, None, "exact", 1000)), parameters(whole))  # it did compress
    if RANK == 0:  # as another number of ranks would have left it
        checkpoint = torch.load(half, weights_only=True)
        checkpoint["lightning_ring_compression"]["state"]["errors"].append({})
        torch.save(checkpoint, tmp_path / "other.ckpt")
    WORLD.Barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = run(4, str(tmp_path / "other.ckpt"), "reset")
    said = [str(warning.message) for warning in caught if "PowerSGD" in str(warning.message)]
    assert len(said) == (RANK == 0), said
    assert all(f"errors of {SIZE + 1} ranks" in text for text in said)
    assert_all_ranks_equal(parameters(module))


def check_a_fit_leaves_nothing_to_the_next_one_nor_to_its_optimizer() -> None:
    start, weights = Classifier(), []
    compressor = PowerSGD(rank=1, start_iter=0)
    for _ in range(2):
        module = copy.deepcopy(start)
        run = fit(RingStrategy(compression=compressor), module, max_epochs=1)
        weights.append(parameters(module))
        optimizer = run.optimizers[0]
        for param in module.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()  # by hand, after the fit
    assert torch.equal(*weights)


def check_compressed_training_comes_close_to_uncompressed() -> None:
    plain, others = Classifier(), {}
    start = copy.deepcopy(plain)
    fit("ring", plain, max_epochs=1)
    for compression in ("fp16", "bf16", "powersgd"):  # PowerSGD's first 1,000 gradients travel whole
        module = others[compression] = copy.deepcopy(start)
        fit(RingStrategy(compression=compression, bucket_cap_mb=0.0005), module, max_epochs=1)
        assert_all_ranks_equal(parameters(module))
        difference = relative_difference(parameters(module), parameters(plain))
        assert difference < {"fp16": 1e-3, "bf16": 5e-3, "powersgd": 1e-6}[compression], (compression, difference)
        if SIZE > 1 and compression != "powersgd":
            assert difference > 0


def check_automatic_buckets_train_the_same() -> None:
    fixed, chosen = Classifier(), Classifier()
    chosen.load_state_dict(fixed.state_dict())
    for compression in (None, "bf16"):
        fit(RingStrategy(compression=compression), fixed)
        fit(RingStrategy(compression=compression, bucket_cap_mb="auto"), chosen)
        assert torch.equal(parameters(fixed), parameters(chosen))


def check_learning_rate_finder() -> None:
    module = Classifier(lr=1e-3)
    fit("ring", module, loader(num=960), callbacks=[LearningRateFinder(num_training_steps=50)], max_epochs=1)
    assert module.lr != 1e-3
    assert len(set(WORLD.allgather(module.lr))) == 1
    assert_all_ranks_equal(parameters(module))


def check_weight_averaging() -> None:
    makers = [lambda: StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)]
    if ema := getattr(L.pytorch.callbacks, "WeightAveraging", None):  # since Lightning 2.6
        makers.append(lambda: ema(avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9)))
    for make in makers:
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


def check_thawed_parameters_are_averaged() -> None:
    class Thawing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.net[0].requires_grad_(True)
                self.optimizers().add_param_group({"params": list(self.net[0].parameters())})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[3].parameters(), lr=0.1)

    module = Thawing()
    before = module.net[0].weight.detach().clone()
    fit("ring", module)
    assert not torch.equal(before, module.net[0].weight)
    assert_all_ranks_equal(parameters(module))


def check_parameters_added_in_training_begin_alike() -> None:
    class Growing(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.head = nn.Linear(4, 4)
                self.optimizers().add_param_group({"params": list(self.head.parameters())})

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(
                self.head(self.net(batch[0])) if self.current_epoch else self.net(batch[0]), batch[1]
            )

    torch.manual_seed(RANK)  # the new layer begins elsewhere on each rank
    module = Growing()
    fit("ring", module)
    assert_all_ranks_equal(parameters(module))


def check_complex_parameters() -> None:
    class Complex(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.mixing = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
            self.sometimes = nn.Parameter(torch.randn(8, dtype=torch.complex64))

        def loss(self, batch: Any) -> Tensor:
            hidden = batch[0].to(torch.complex64) @ self.mixing
            if len(self.seen["loss"]) % 2 and RANK == 0:
                hidden = hidden * self.sometimes
            return F.cross_entropy(self.net(hidden.abs()), batch[1])

        def on_after_backward(self) -> None: ...

    ring, reference = both(Complex, ddp=ddp(find_unused_parameters=True))
    ring, reference = (torch.view_as_real(module.mixing.detach()).double().flatten() for module in (ring, reference))
    assert_all_ranks_equal(ring)
    assert relative_difference(ring, reference) < 1e-5


def check_a_reduced_loss_keeps_its_gradient() -> None:
    class Reducing(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.trainer.strategy.reduce(self.loss(batch) * 1.0)

    assert_like_ddp(*both(Reducing))


def check_mismatched_models_are_an_error_on_every_rank() -> None:
    if SIZE == 1:
        return
    for make in (_wider, _other_dtype, _one_more):
        with pytest.raises(ModelMismatchError) as caught:
            fit("ring", make())
        texts = WORLD.allgather(str(caught.value))
        assert len(set(texts)) == 1, texts
        assert str(SIZE - 1) in texts[0]


def _wider() -> Classifier:
    module = Classifier()
    if RANK == SIZE - 1:
        module.net[3] = nn.Linear(16, 5)
    return module


def _other_dtype() -> Classifier:
    module = Classifier()
    if RANK == SIZE - 1:
        module.net[3].half()
    return module


def _one_more() -> Classifier:
    module = Classifier()
    if RANK == SIZE - 1:
        module.extra = nn.Linear(2, 2)
    return module


def _uneven_loader(extra: int = 2) -> DataLoader:
    """The last rank has ``extra`` batches fewer than the others."""
    num = 4 * (6 - extra if RANK == SIZE - 1 else 6)
    return DataLoader(Subset(data(), range(RANK * 4, RANK * 4 + num)), batch_size=4)


def check_uneven_batches_are_an_error_on_every_rank() -> None:
    if SIZE == 1:
        return
    with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} has 4.*step 4"):
        fit("ring", Classifier(), _uneven_loader(), use_distributed_sampler=False)
    # training that ends before anybody runs out is nobody's error
    fit("ring", Classifier(), _uneven_loader(), use_distributed_sampler=False, max_steps=4, max_epochs=1)
    fit("ring", Classifier(), _uneven_loader(), use_distributed_sampler=False, limit_train_batches=3)


def check_uneven_batches_with_steps_of_the_users_own_are_an_error() -> None:
    class Seldom(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))
            if batch_idx % 4 == 3:  # `max_steps` counts these
                self.optimizers().step()

    if SIZE == 1:
        return
    module = Seldom()
    module.automatic_optimization = False
    with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} has 4"):
        fit("ring", module, _uneven_loader(), use_distributed_sampler=False, max_steps=2, max_epochs=-1)


class _Stream(IterableDataset):
    def __init__(self, num: int) -> None:
        self.rows = [data()[i] for i in range(num)]

    def __iter__(self) -> Any:
        return iter(self.rows)


def check_uneven_streams_are_an_error_at_the_step() -> None:
    if SIZE == 1:
        return
    module = Classifier()
    with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} ran out .*step 4"):
        fit("ring", module, DataLoader(_Stream(16 if RANK == SIZE - 1 else 24), batch_size=4))


def check_join_goes_on_with_the_ranks_that_have_data() -> None:
    if SIZE == 1:
        return
    for train in (_uneven_loader(), DataLoader(_Stream(16 if RANK == SIZE - 1 else 24), batch_size=4)):
        L.seed_everything(3, verbose=False)
        module = Classifier().double()
        whole = copy.deepcopy(module)
        run = fit(
            RingStrategy(uneven="join"), module, train, use_distributed_sampler=False, max_epochs=1, precision="64-true"
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
        counted = [loss for rank, own in enumerate(losses) for loss in own[: 6 if rank < SIZE - 1 else 4]]
        torch.testing.assert_close(run.callback_metrics["loss_epoch"].double(), torch.stack(counted).mean())


def check_join_ends_with_the_loader_that_needed_it() -> None:
    if SIZE == 1:
        return

    class Reloading(Classifier):
        def train_dataloader(self) -> Any:
            return _uneven_loader() if self.current_epoch == 0 else _uneven_loader(extra=0)

    L.seed_everything(3, verbose=False)
    module = Reloading().double()
    whole = copy.deepcopy(module)
    arguments = {"use_distributed_sampler": False, "precision": "64-true", "reload_dataloaders_every_n_epochs": 1}
    run = trainer(RingStrategy(uneven="join"), **arguments)
    run.fit(module)
    assert run.global_step == 12
    rows = WORLD.allgather(module.seen["index"])
    xs, ys, _ = data().tensors
    steps = [
        [i for rank in range(SIZE) if step not in (4, 5) or rank < SIZE - 1 for i in rows[rank][step]]
        for step in range(12)
    ]
    one_process(whole, [[xs[row].double(), ys[row]] for row in steps], lr=0.1, momentum=0.9)
    assert relative_difference(parameters(module), parameters(whole)) < 1e-12


def check_join_counts_no_metric_twice_and_allows_inner_gradients() -> None:
    from torchmetrics import SumMetric

    class Penalised(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.batches = SumMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.batches.update(1.0)
            self.log("batches", self.batches, on_epoch=True)
            x = batch[0].clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return self.loss(batch) + slope.square().mean()

    if SIZE == 1:
        return
    module = Penalised()
    run = fit(RingStrategy(uneven="join"), module, _uneven_loader(), use_distributed_sampler=False, max_epochs=1)
    assert run.callback_metrics["batches"] == 6 * SIZE - 2
    assert_all_ranks_equal(parameters(module))


def check_join_takes_part_in_collectives_inside_backward() -> None:
    class Gathering(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.all_gather(self.loss(batch), sync_grads=True).mean()

    if SIZE == 1:
        return
    for accumulate in (1, 2):
        module = Gathering(batch_norm=True)
        run = fit(
            RingStrategy(uneven="join"),
            module,
            _uneven_loader(),
            use_distributed_sampler=False,
            accumulate_grad_batches=accumulate,
        )
        assert run.global_step == 12 // accumulate
        assert_all_ranks_equal(parameters(module))


def check_streams_in_a_combined_loader_and_behind_an_iterator() -> None:
    class Both(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(self.loss(part) for part in batch.values() if part is not None)

    class Fetching(Classifier):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, _, _ = next(dataloader_iter)
            return self.loss(batch)

    for mode in ("max_size_cycle", "min_size", "max_size"):
        streams = {name: DataLoader(_Stream(num), batch_size=4) for name, num in (("a", 24), ("b", 8))}
        module = Both()
        run = fit("ring", module, CombinedLoader(streams, mode))
        assert run.global_step == 2 * (2 if mode == "min_size" else 6)
        assert_all_ranks_equal(parameters(module))
    module = Fetching()
    run = fit("ring", module, DataLoader(_Stream(24), batch_size=4))
    assert run.current_epoch == 2
    assert_all_ranks_equal(parameters(module))
    if SIZE > 1:
        assert not run.strategy._job.watch._reported, "the end of the data was reported as a failure"
        with pytest.raises(ConfigurationError, match="dataloader_iter"):
            fit(RingStrategy(uneven="join"), Fetching(), _uneven_loader(), use_distributed_sampler=False)


class _Promising(_Stream):
    def __len__(self) -> int:
        return 24


def check_streams_that_end_before_their_length_are_an_error_at_the_step() -> None:
    if SIZE == 1:
        return
    with pytest.raises(UnevenBatchesError, match=rf"rank {SIZE - 1} ran out .*step 4"):
        fit("ring", Classifier(), DataLoader(_Promising(16 if RANK == SIZE - 1 else 24), batch_size=4))


def check_join_refuses_manual_optimization() -> None:
    if SIZE == 1:
        return
    module = Classifier()
    module.automatic_optimization = False
    with pytest.raises(ConfigurationError, match="manual optimization"):
        fit(RingStrategy(uneven="join"), module, _uneven_loader(), use_distributed_sampler=False)


def check_devices_that_disagree_with_the_launcher() -> None:
    for devices in (SIZE + 1, 1) if SIZE > 1 else (2,):
        with pytest.raises(RingError, match=rf"devices={devices}.*{SIZE}"):
            trainer("ring", devices=devices)
        with pytest.raises(RingError, match=rf"devices={devices}.*{SIZE}"):
            trainer(RingStrategy(), devices=devices)
    with pytest.raises(RingError, match="num_nodes=3"):
        trainer("ring", devices=SIZE, num_nodes=3)
    assert trainer("ring").world_size == trainer("ring", devices=SIZE).world_size == SIZE


def check_one_rank_communicates_nothing() -> None:
    if SIZE > 1:
        return
    import torch.distributed as dist

    calls: list[str] = []
    originals = {
        name: getattr(dist, name) for name in ("all_reduce", "broadcast", "barrier", "all_gather", "new_group")
    }
    for name, original in originals.items():
        setattr(dist, name, lambda *a, _n=name, _o=original, **k: (calls.append(_n), _o(*a, **k))[1])
    try:
        module = Classifier()
        fit("ring", module, val=loader())
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
    assert not calls, calls
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters() if p._post_accumulate_grad_hooks)
    assert torch.equal(_trained_alone("ring"), _trained_alone("auto"))


def check_forced_communication_on_one_rank() -> None:
    if SIZE == 1:
        forced = _trained_alone(RingStrategy(force_communication=True))
        assert torch.equal(forced, _trained_alone("auto"))


def _trained_alone(strategy: Any) -> Tensor:
    L.seed_everything(7, verbose=False)
    module = Classifier()
    # as with DDP, Lightning puts a sampler of one replica in; without it both see the data in one order
    fit(strategy, module, use_distributed_sampler=False)
    return parameters(module)


def check_module_of_the_other_lightning_is_refused() -> None:
    import pytorch_lightning

    class Foreign(pytorch_lightning.LightningModule):
        pass

    with pytest.raises(ConfigurationError, match="Foreign is a pytorch_lightning module"):
        fit("ring", Foreign())


def check_batch_size_finder_says_it_is_for_one_rank() -> None:
    from lightning.pytorch.callbacks import BatchSizeFinder
    from lightning.pytorch.utilities.exceptions import MisconfigurationException

    with pytest.raises(MisconfigurationException, match="distributed"):
        fit("ring", Classifier(), callbacks=[BatchSizeFinder()])


def check_trains_again_after_the_script_destroyed_the_group() -> None:
    for backend in ("gloo", "auto"):
        module = Classifier()
        fit(RingStrategy(backend=backend), module, max_epochs=1)
        torch.distributed.destroy_process_group()
        fit(RingStrategy(backend=backend), module, max_epochs=1)
        assert torch.distributed.is_initialized()
        assert_all_ranks_equal(parameters(module))
