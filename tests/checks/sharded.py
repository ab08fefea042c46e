"""Checks of ``ring_sharded`` on real ranks: it must take the steps that ``ring`` takes, to the bit where it can."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import time
import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, OnExceptionCheckpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import grad_norm
from lightning.pytorch.utilities.exceptions import SIGTERMException
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DistributedSampler

from lightning_ring import RingStrategy
from lightning_ring.errors import CollectiveError, ConfigurationError, RingError
from lightning_ring.optim import LAMB, LARS, exclude_bias_and_norm
from tests.checks.models import (
    RANK,
    SIZE,
    Classifier,
    assert_all_ranks_equal,
    data,
    fit,
    loader,
    parameters,
    relative_difference,
    trainer,
)

CAP = 0.0005  # MiB: about one layer a bucket


def sharded(**kwargs: Any) -> RingStrategy:
    return RingStrategy(shard_optimizer=True, bucket_cap_mb=CAP, **kwargs)


def both(make: Any, train: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """``make()`` trained with sharded and with whole optimizers, from the same seed."""
    modules = []
    for shard_optimizer in (True, False):
        L.seed_everything(7, verbose=False)
        module = make()
        arguments = {key: value() if key in ("plugins", "callbacks") else value for key, value in kwargs.items()}
        fit(RingStrategy(shard_optimizer=shard_optimizer, bucket_cap_mb=CAP), module, train, **arguments)
        modules.append(module)
    return modules[0], modules[1]


def assert_same(mine: nn.Module, reference: nn.Module, tolerance: float = 0.0) -> None:
    """``tolerance`` 0 means the same bits, on up to two ranks: with more, additions come in another order."""
    assert_all_ranks_equal(parameters(mine))
    difference = relative_difference(parameters(mine), parameters(reference))
    limit = max(tolerance, 0.0 if SIZE <= 2 else 1e-5)
    assert difference <= limit, difference


class With(Classifier):
    """A classifier whose optimizer is what ``make(module)`` returns."""

    def __init__(self, make: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self)


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
        make = functools.partial(With, lambda m, kind=kind, kwargs=kwargs: kind(m.parameters(), **kwargs))
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
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]

    clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    assert_same(*both(functools.partial(With, make), accumulate_grad_batches=2, **clipping))


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


def check_norms_of_shards_are_a_warning() -> None:
    class Manual(Classifier):
        def __init__(self, clip: Any) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.clip = clip

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            self.clip(self)
            optimizer.step()

    class Logging(Classifier):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            grad_norm(self, 2)

    def wrong(module: Any) -> None:
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    def right(module: Any) -> None:
        before = float(module.trainer.strategy.clip_grad_norm_(module.parameters(), float("inf")))
        module.clip_gradients(module.optimizers(), gradient_clip_val=0.1)
        after = float(module.trainer.strategy.clip_grad_norm_(module.parameters(), float("inf")))
        assert after == pytest.approx(min(before, 0.1), rel=1e-4)

    for module, warns in ((Manual(wrong), True), (Logging(), True), (Manual(right), False)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(sharded(), module, max_epochs=1)
        told = [one for one in caught if "a norm of gradients was taken" in str(one.message)]
        assert len(told) == (warns and RANK == 0)


def check_loss_scaling_skips_the_same_steps() -> None:
    class Overflowing(With):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            # the last layer's bias alone overflows, which lies in one rank's shard
            return loss + (self.net[-1].bias * 1e38).sum() * 1e10 if batch_idx == 1 and RANK == 0 else loss

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
                for part in (0.25, 0.75):  # two backwards before the step; the second one adds to averages
                    loss = self.critic(fake.detach()).mean() - self.critic(batch[0]).mean()
                    loss = part * (loss if which == 0 else -self.critic(fake).mean())
                    if batch_idx == 2:
                        loss.backward(retain_graph=True)
                    else:
                        self.manual_backward(loss, retain_graph=True)
                self.clip_gradients(optimizer, gradient_clip_val=0.1)
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self) -> Any:
            return [AdamW(self.critic.parameters(), lr=0.01), SGD(self.generator.parameters(), lr=0.1, momentum=0.9)]

    assert_same(*both(Gan, max_epochs=1), 1e-6)


class Thawing(Callback):
    """Freezes the first layer and thaws it after two batches; freezes the last one after four."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.net[0].requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            module.net[0].requires_grad_(True)
            trainer.optimizers[0].add_param_group({"params": list(module.net[0].parameters()), "lr": 0.02})
        if batch_idx == 4:
            module.net[-1].requires_grad_(False)


def check_frozen_and_thawed_parameters_and_an_average_equal_whole_ones() -> None:
    averages: list[EMAWeightAveraging] = []

    def callbacks() -> list[Callback]:
        averages.append(EMAWeightAveraging(decay=0.5))
        return [Thawing(), averages[-1]]

    make = functools.partial(With, lambda m: AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01))
    assert_same(*both(make, max_epochs=1, callbacks=callbacks))
    assert_same(*(average._average_model for average in averages))


# --- parameters that arrive late


class LateWork:
    def __init__(self, work: Any, buffer: Tensor, flat: Tensor) -> None:
        self._work, self._buffer, self._flat = work, buffer, flat
        self._until = time.monotonic() + 0.1

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._until - time.monotonic()))
        self._flat.copy_(self._buffer)

    def done(self) -> bool:
        return False


class Late:
    """A communicator whose all-gathers arrive 100 ms late, and not before somebody waits for them."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.gathered: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather_(self, flat: Tensor, *, name: str = "") -> Any:
        self.gathered.append(name)
        buffer = flat.clone()
        return LateWork(self._comm.all_gather_(buffer, name=name), buffer, flat)


class LateRing(RingStrategy):
    def setup_distributed(self) -> None:
        super().setup_distributed()
        self._job.communicator = self.late = Late(self._job.communicator)

    def teardown(self) -> None:
        super().teardown()
        self._job.communicator = self.late._comm


class Tied(Classifier):
    """Reads parameters in every way that is not a plain call of the module they belong to."""

    def __init__(self) -> None:
        super().__init__(lr=0.3)
        self.net = nn.Linear(8, 4)
        self.table = nn.Embedding(6, 8)
        self.head = nn.Linear(8, 6)
        self.head.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.lstm = nn.LSTM(8, 8)

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.square().sum() for p in reversed(list(self.parameters())))  # before any module was called
        x = F.linear(batch[0], self.table.weight)  # the embedding is used before, and without, its forward
        x = self.head.forward(F.embedding(x.argmax(1), self.table.weight) * self.scale)
        x = self.lstm(F.linear(x, self.table.weight.t())[None])[0][0]
        return F.cross_entropy(self.net(x), batch[1]) + 0.01 * penalty


class Patient(LateRing):
    """Waits after each step."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self._sharding.overlaps = False


class Noting(Callback):
    """Reads parameters in hooks between two steps."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sums += [p.detach().double().sum() for p in module.parameters()]

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.sums += [p.detach().double().sum() for p in list(module.parameters())[-1:]]


def run_late(module: Any, callbacks: list[Callback] | None = None, kind: Any = LateRing) -> LateRing:
    strategy = kind(shard_optimizer=True, bucket_cap_mb=CAP)
    fit(strategy, module, loader(24), callbacks=callbacks, max_epochs=1)
    return strategy


def check_late_parameters_are_waited_for_by_whoever_reads_them() -> None:
    L.seed_everything(7, verbose=False)
    start = Tied()
    results = []
    for kind in (LateRing, Patient, None):
        module = copy.deepcopy(start)
        if kind is not None:
            late = run_late(module, kind=kind)
            assert late._sharding._coverage.trusted
            assert len(late.late.gathered) > 6
        else:
            fit(RingStrategy(bucket_cap_mb=CAP), module, loader(24), max_epochs=1)
        results.append(module)
    assert torch.equal(parameters(results[0]), parameters(results[1]))
    assert_same(results[0], results[2])


def check_hooks_between_steps_read_new_values() -> None:
    L.seed_everything(7, verbose=False)
    start, sums = Classifier(), []
    for kind in (LateRing, Patient):
        noting = Noting()
        run_late(copy.deepcopy(start), [noting], kind)
        assert not {"on_train_batch_start", "on_train_batch_end"} & vars(noting).keys()  # what watched them is gone
        sums.append(torch.stack(noting.sums))
    assert torch.equal(sums[0], sums[1])
    assert len(sums[0].unique()) > 4  # they change from step to step


def check_parameters_travel_in_the_order_of_use_while_forward_goes_on() -> None:
    events: list[str] = []

    class Layers(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 4))
            for index, layer in enumerate(self.net):
                layer.register_forward_hook(lambda *_, index=index: events.append(f"used {index}"))

    module = Layers()
    waits: list[int] = []

    class Counting(LateRing):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            waits.append(len(self._sharding._parameters._coming))
            events.append("step")
            return super().training_step(*args, **kwargs)

    strategy = run_late(module, kind=Counting)
    assert waits[0] == 0
    assert set(waits[1:]) == {len(strategy._sharding._parameters.buckets)}, waits  # all still on their way
    first = [name.split("(")[1].split(".")[1] for name in strategy.late.gathered[: waits[1]]]
    assert first == sorted(first), first
    assert first[0] == "0"


@torch.jit.script
def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return 2 * torch.mm(x, weight)


OUT_OF_SIGHT = {"doubled": doubled}  # in a dict it is not found before training


def check_reads_that_nobody_sees_switch_to_waiting_and_say_so() -> None:
    class Hidden(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(8, 8)

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(OUT_OF_SIGHT["doubled"](batch[0], self.hidden.weight)), batch[1])

    late, plain = Hidden(), Hidden()
    plain.load_state_dict(late.state_dict())
    with pytest.warns(UserWarning, match=r"hidden.weight got a gradient") if RANK == 0 else contextlib.nullcontext():
        strategy = run_late(late)
    assert not strategy._sharding._coverage.trusted
    fit(RingStrategy(bucket_cap_mb=CAP), plain, loader(24), max_epochs=1)
    assert_same(late, plain)

    class Later(Hidden):
        def loss(self, batch: Any) -> Tensor:
            if len(self.seen["loss"]) < 2:
                return F.cross_entropy(self.net(batch[0] @ self.hidden.weight), batch[1])
            return super().loss(batch)

    with pytest.raises(RingError, match=r"hidden.weight got a gradient.*wait_parameters"):
        run_late(Later())

    class Told(Later):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.trainer.strategy.wait_parameters()
            return super().training_step(batch, batch_idx)

    told, plain = Told(), Told()
    plain.load_state_dict(told.state_dict())
    run_late(told)
    fit(RingStrategy(bucket_cap_mb=CAP), plain, loader(24), max_epochs=1)
    assert_same(told, plain)


def check_scripted_and_compiled_code_is_found_before_it_reads() -> None:
    class Scripted(Classifier):
        """Reads a weight unseen before it is read seen."""

        def loss(self, batch: Any) -> Tensor:
            x = batch[0]
            return F.cross_entropy(self.net(doubled(x, self.square.weight) + self.square(x)), batch[1])

        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(8, 8)

    class Compiled(Scripted):
        def loss(self, batch: Any) -> Tensor:
            x = batch[0]
            return F.cross_entropy(self.net(compiled(x, self.square.weight) + self.square(x)), batch[1])

    class Within(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.also = torch.jit.script(nn.Linear(8, 8))

        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.net(self.also(batch[0])), batch[1])

    compiled = torch.compile(lambda x, weight: torch.mm(x, weight), backend="eager")
    for make, name in ((Scripted, "doubled"), (Compiled, "compiled"), (Within, "also")):
        late, plain = make(), make()
        plain.load_state_dict(late.state_dict())
        expected = pytest.warns(UserWarning, match=f"{name} is scripted or compiled")
        with expected if RANK == 0 else contextlib.nullcontext():
            run_late(late)
        fit(RingStrategy(bucket_cap_mb=CAP), plain, loader(24), max_epochs=1)
        assert_same(late, plain)


def check_hooks_and_callbacks_see_whole_parameters() -> None:
    class Reading(Classifier):
        def read(self) -> None:
            assert self.trainer.strategy._sharding._parameters.whole

        def on_train_epoch_end(self) -> None:
            self.read()

        def on_validation_model_eval(self) -> None:
            self.read()
            super().on_validation_model_eval()

        def on_validation_model_zero_grad(self) -> None:
            self.read()
            super().on_validation_model_zero_grad()

        def val_dataloader(self) -> Any:
            if self.trainer.global_step:
                self.read()
                reloaded.append(self.trainer.global_step)
            return loader(8)

        def on_validation_start(self) -> None:
            self.read()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.read()
            super().validation_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: Any) -> None:
            self.read()

    class Ends(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.read()

        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    module = Reading()
    strategy = LateRing(shard_optimizer=True, bucket_cap_mb=CAP)
    reloaded: list[int] = []
    run = trainer(strategy, callbacks=[Ends()], max_epochs=2, val_check_interval=2, reload_dataloaders_every_n_epochs=1)
    run.fit(module, loader(24))
    assert reloaded
    assert strategy._sharding.overlaps
    assert module.seen["eval"]
    assert [type(callback) for callback in run.callbacks if isinstance(callback, Ends)] == [Ends]
    # the module is left as it was: no storage that other parameters lie in
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in module.parameters())


# --- checkpoints


def check_state_is_a_share_and_its_checkpoint_is_ordinary(tmp_path: Path) -> None:
    make = functools.partial(With, lambda m: AdamW(m.parameters(), lr=0.01))
    states = []
    for index, strategy in enumerate((sharded(), RingStrategy(bucket_cap_mb=CAP))):
        L.seed_everything(7, verbose=False)
        run = fit(strategy, make(), max_epochs=1)
        state = run.optimizers[0].state
        states.append(sum(v.numel() for s in state.values() for v in s.values() if v.dim()))
        run.save_checkpoint(tmp_path / f"{index}.ckpt")  # after the end of fit, too
        run.strategy.barrier()
    padding = 2 * 4 * 16  # two moments, four parameters, one cache line
    assert states[0] <= states[1] / SIZE + padding, states
    mine, reference = (torch.load(tmp_path / f"{i}.ckpt", weights_only=True)["optimizer_states"][0] for i in (0, 1))
    assert mine["param_groups"] == reference["param_groups"]
    assert mine["state"].keys() == reference["state"].keys()
    for index, state in reference["state"].items():
        for key, value in state.items():
            assert value.shape == mine["state"][index][key].shape
            torch.testing.assert_close(mine["state"][index][key], value, rtol=1e-6, atol=1e-9)


def check_checkpoints_resume_under_any_strategy(tmp_path: Path) -> None:
    def make() -> Any:
        return With(lambda m: AdamW(m.parameters(), lr=0.01))

    def half(strategy: Any, name: str) -> None:
        L.seed_everything(7, verbose=False)
        fit(strategy, make(), max_epochs=1).save_checkpoint(tmp_path / name)

    def rest(strategy: Any, name: str) -> Any:
        module = make()
        trainer(strategy, max_epochs=2).fit(module, loader(), ckpt_path=tmp_path / name)
        return module

    half(sharded(), "sharded.ckpt")
    half(RingStrategy(bucket_cap_mb=CAP), "ring.ckpt")
    results = [
        rest(strategy(), name)
        for strategy in (sharded, functools.partial(RingStrategy, bucket_cap_mb=CAP))
        for name in ("sharded.ckpt", "ring.ckpt")
    ]
    for result in results[1:]:
        assert_same(results[0], result)
    wrong = make()
    wrong.net = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 4))
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        trainer(sharded(), max_epochs=2).fit(wrong, loader(), ckpt_path=tmp_path / "ring.ckpt")
    assert not isinstance(caught.value, RingError)


def check_state_dict_of_a_part_is_refused() -> None:
    class Asking(With):
        def on_train_end(self) -> None:
            with pytest.raises(ConfigurationError, match="optimizer_state"):
                self.trainer.optimizers[0].state_dict()
            states.append(self.trainer.strategy.optimizer_state(self.optimizers()))

    states: list[dict[str, Any]] = []
    fit(sharded(), Asking(lambda m: AdamW(m.parameters(), lr=0.01)), max_epochs=1)
    assert bool(states[0]) == (RANK == 0)


def check_optimizers_that_look_at_whole_tensors_are_refused() -> None:
    def lbfgs(module: nn.Module) -> Any:
        return torch.optim.LBFGS(module.parameters())

    def adafactor(module: nn.Module) -> Any:
        return torch.optim.Adafactor(module.parameters())

    for make, name in ((lbfgs, "LBFGS"), (adafactor, "Adafactor")):
        with pytest.raises(ConfigurationError, match=f"{name} cannot be sharded.*strategy='ring'"):
            fit(sharded(), With(make), max_epochs=1)


def check_sizes_chosen_later_and_a_short_wire_equal_whole_ones() -> None:
    def run(shard_optimizer: bool) -> Any:
        L.seed_everything(7, verbose=False)
        module = With(lambda m: LAMB(m.parameters(), lr=0.01))
        strategy = RingStrategy(shard_optimizer=shard_optimizer, bucket_cap_mb="auto", compression="bf16")
        run = fit(strategy, module)
        if shard_optimizer:
            assert strategy._sharding._parameters.buckets  # parts were stepped in the end
            ratios = run.optimizers[0].trust_ratios
            assert torch.isfinite(ratios).all()
            assert ratios.shape == (4,)
        return module

    assert_same(run(True), run(False), 1e-6)


def check_a_stop_of_all_ranks_saves_the_whole_state(tmp_path: Path) -> None:
    class Stopping(With):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1 and RANK == SIZE - 1:
                self.trainer.strategy._ask_to_stop()

    make = functools.partial(Stopping, lambda m: AdamW(m.parameters(), lr=0.01))
    with pytest.raises(SIGTERMException):
        fit(sharded(), make(), callbacks=[OnExceptionCheckpoint(tmp_path, "stopped")], enable_checkpointing=True)
    MPI.COMM_WORLD.Barrier()
    state = torch.load(tmp_path / "stopped.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert [tuple(s["exp_avg"].shape) for s in state.values()] == [tuple(p.shape) for p in make().parameters()]


def check_a_checkpoint_goes_on_in_one_process(tmp_path: Path) -> None:
    def make() -> Any:
        return With(lambda m: AdamW(m.parameters(), lr=0.01))

    L.seed_everything(7, verbose=False)
    double = {"precision": "64-true"}
    fit(sharded(), make(), max_epochs=1, **double).save_checkpoint(tmp_path / "half.ckpt")
    MPI.COMM_WORLD.Barrier()
    together, alone = make(), make()
    mine = loader(sampler=DistributedSampler(data(), SIZE, RANK, shuffle=False))
    run = trainer(sharded(), max_epochs=2, use_distributed_sampler=False, **double)
    run.fit(together, mine, ckpt_path=tmp_path / "half.ckpt")
    if RANK == 0:  # one process sees the batches of all ranks at once
        run = trainer("auto", devices=1, max_epochs=2, **double)
        run.fit(alone, loader(batch_size=4 * SIZE), ckpt_path=tmp_path / "half.ckpt")
        assert run.world_size == 1
        assert relative_difference(parameters(alone), parameters(together)) < 1e-12
    MPI.COMM_WORLD.Barrier()


def check_reading_the_state_of_a_parameter_does_not_restart_the_optimizer() -> None:
    class Curious(With):
        def on_train_batch_end(self, *_: Any) -> None:
            optimizer = self.trainer.optimizers[0]
            for param in self.parameters():
                optimizer.state[param].get("exp_avg")

    make = functools.partial(Curious, lambda m: AdamW(m.parameters(), lr=0.01))
    assert_same(*both(make, max_epochs=1))


def check_sizes_chosen_later_go_on_with_the_state_of_a_checkpoint(tmp_path: Path) -> None:
    def make() -> Any:
        return With(lambda m: AdamW(m.parameters(), lr=0.01))

    L.seed_everything(7, verbose=False)
    fit(sharded(), make(), max_epochs=1).save_checkpoint(tmp_path / "half.ckpt")
    results = []
    for shard_optimizer in (True, False):
        results.append(make())
        strategy = RingStrategy(shard_optimizer=shard_optimizer, bucket_cap_mb="auto")
        run = trainer(strategy, max_epochs=2)
        run.fit(results[-1], loader(), ckpt_path=tmp_path / "half.ckpt")
        if shard_optimizer:
            assert strategy._sharding._parameters.buckets  # parts were stepped in the end
    assert_same(*results)


def check_a_checkpoint_after_an_exception_holds_whole_weights_and_resumes(tmp_path: Path) -> None:
    class Corrupt(With):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                raise OSError("corrupt photo")

    def make(kind: Any = With) -> Any:
        L.seed_everything(7, verbose=False)
        return kind(lambda m: AdamW(m.parameters(), lr=0.01))

    saves = OnExceptionCheckpoint(tmp_path, "late")
    strategy = LateRing(shard_optimizer=True, bucket_cap_mb=CAP)
    with pytest.raises(OSError, match="corrupt photo"):
        fit(strategy, make(Corrupt), callbacks=[saves], enable_checkpointing=True, max_epochs=1)
    MPI.COMM_WORLD.Barrier()
    expected = make()
    fit(RingStrategy(bucket_cap_mb=CAP), expected, max_epochs=1, limit_train_batches=3)
    saved = make()
    saved.load_state_dict(torch.load(tmp_path / "late.ckpt", weights_only=True)["state_dict"])
    assert_same(saved, expected)
    for strategy in (sharded(), RingStrategy(bucket_cap_mb=CAP)):
        with pytest.warns(UserWarning, match="no state for some") if RANK == 0 else contextlib.nullcontext():
            trainer(strategy, max_epochs=2).fit(make(), loader(), ckpt_path=tmp_path / "late.ckpt")


def check_weights_that_do_not_arrive_after_an_exception_are_a_warning(tmp_path: Path) -> None:
    class LostWork(LateWork):
        def wait(self) -> None:
            if lost:
                raise CollectiveError("lost")
            super().wait()

    class Losing(Late):
        def all_gather_(self, flat: Tensor, *, name: str = "") -> Any:
            buffer = flat.clone()
            return LostWork(self._comm.all_gather_(buffer, name=name), buffer, flat)

    class LosingRing(LateRing):
        def setup_distributed(self) -> None:
            super().setup_distributed()
            self._job.communicator = self.late = Losing(self.late._comm)

    class Raising(Classifier):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                lost.append(True)
                raise OSError("corrupt photo")

    lost: list[bool] = []
    saves = OnExceptionCheckpoint(tmp_path, "torn")
    warned = pytest.warns(UserWarning, match="weights.*mix") if RANK == 0 else contextlib.nullcontext()
    strategy = LosingRing(shard_optimizer=True, bucket_cap_mb=CAP)
    with warned, pytest.raises(OSError, match="corrupt photo"):
        fit(strategy, Raising(), callbacks=[saves], enable_checkpointing=True, max_epochs=1)


def check_weights_loaded_after_training_stay(tmp_path: Path) -> None:
    module = Classifier()
    before = copy.deepcopy(module.state_dict())
    run = trainer(LateRing(shard_optimizer=True, bucket_cap_mb=CAP), max_epochs=1, default_root_dir=tmp_path)
    Tuner(run).lr_find(module, loader(), num_training=4)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name]), name


def check_tensors_in_the_same_memory_are_refused() -> None:
    class Alias(Classifier):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
            if kind == "parameter":
                self.net[1].weight.data = self.net[0].weight.data
            else:
                self.register_buffer("bias", self.net[0].bias.detach()[2:])

    for kind, names in (("parameter", "net.0.weight and net.1.weight"), ("buffer", "net.0.bias and bias")):
        with pytest.raises(ConfigurationError, match=f"{names} are two tensors in the same memory.*strategy='ring'"):
            fit(sharded(), Alias(kind), max_epochs=1)


class Copied(With):
    """A class that pickle finds, copied and saved in the middle of training."""

    copies: ClassVar[list[Any]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            file = io.BytesIO()
            torch.save(self, file)
            file.seek(0)
            self.copies += [copy.deepcopy(self), torch.load(file, weights_only=False)]
            self.copies += [copy.deepcopy(self.net), [p.detach().clone() for p in self.parameters()]]


def make_sgd(module: nn.Module) -> Any:
    return SGD(module.parameters(), lr=0.1)


def check_modules_can_be_copied_and_saved_during_training() -> None:
    Copied.copies.clear()
    module = Copied(make_sgd)
    run_late(module)
    copied, saved, net, values = Copied.copies
    for other in (copied, saved, net):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), values, strict=True))
    for other in (copied, saved):
        other.loss([part[:4] for part in data()[:4]]).backward()
        assert other.on_train_batch_end.__self__ is other
        fit(RingStrategy(bucket_cap_mb=CAP), other, max_epochs=1)
    assert not torch.equal(parameters(copied), parameters(module))
