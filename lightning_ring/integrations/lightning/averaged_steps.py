"""What Lightning's hooks do with gradients: buckets average them over the ranks while backward goes on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.comm.replicate import broadcast_tensors
from lightning_ring.gradients import AutoBuckets, Reducer, ShardReducer, default_cap_mb
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.sparse import sparse_weights
from lightning_ring.gradients.squared_norms import squares_by_bucket
from lightning_ring.integrations.lightning.combined_loader import TrainingLoaders
from lightning_ring.integrations.lightning.manual_backward import calls_manual_backward
from lightning_ring.integrations.lightning.sharded_steps import ShardedSteps
from lightning_ring.integrations.lightning.uneven import agree_on_batches, batches_until_the_end, say_what_is_padded
from lightning_ring.integrations.lightning.zero_loss import StandInLoss
from lightning_ring.options import RingOptions


class AveragedSteps(ShardedSteps):
    """Training steps whose gradients are averages over the ranks that have data, from `on_after_backward` on."""

    def __init__(self, options: RingOptions, **of_lightning: Any) -> None:
        super().__init__(options, **of_lightning)
        self._reducer: Reducer | None = None
        self._compressor: Compressor | None = None
        self._step_hooks: list[RemovableHandle] = []
        self._stand_in = StandInLoss()
        self._calls_manual_backward = False
        self._training_loaders = TrainingLoaders()

    # -- set-up and tear-down

    def configure_ddp(self) -> None:
        """Put the gradients into buckets; the module stays unwrapped."""
        if self._comm is None:
            return
        assert self.model is not None
        self._compressor = self.options.new_compressor()
        cap, auto = self.options.bucket_cap_on(self.root_device, self.world_size), None
        if cap == "auto":
            cap = default_cap_mb(self.root_device.type, self.world_size)
            halves = self.options.shard_optimizer
            auto = AutoBuckets(self._comm, _say, default_cap_mb=cap, halves=halves, compressor=self._compressor)
        assert self.lightning_module is not None
        self._calls_manual_backward = calls_manual_backward(self.lightning_module)
        self._recorded = RecordedCommunicator(self._comm, self.listeners)
        self._reducer = (ShardReducer if self.options.shard_optimizer else Reducer)(
            self._recorded,
            self.model.named_parameters(),
            bucket_cap_mb=cap,
            auto=auto,
            compressor=self._compressor,
            warn=lambda message: rank_zero_warn(f"lightning_ring: {message}"),
            sparse_weights=functools.partial(sparse_weights, self.model),
        )
        compressed = f" as {self._compressor.name}" if self._compressor else ""
        _say(
            f"{self.world_size} ranks on {self.ring_environment.num_nodes()} node(s), gradients by "
            f"{type(self._comm).__name__}{compressed} in {len(self._reducer.buckets)} bucket(s) of up to {cap:g} MiB"
        )

    def _follow_optimizers(self, trainer: pl.Trainer) -> None:
        """See every step of an optimizer, set up or not: by then all gradients have arrived.

        Objects with Lightning's `Optimizable` protocol may have no hooks; `optimizer_step` sees their steps.
        """
        if self._reducer is None:
            return
        self._step_hooks.append(register_optimizer_step_pre_hook(self._before_step))
        self._step_hooks.append(register_optimizer_step_post_hook(self._after_step))
        if isinstance(self._reducer, ShardReducer):
            self._shard_optimizers(trainer, self._reducer)

    def teardown(self) -> None:
        # what other code would meet goes first: the rest may raise, as where a device is out of memory
        for hook in self._step_hooks:
            hook.remove()
        self._step_hooks.clear()
        if self._trainer is not None:
            self._training_loaders.release(self._trainer)
        super().teardown()
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None

    # -- batches

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer
        if self._comm is None or trainer is None:
            return dataloader
        say_what_is_padded(dataloader, self.world_size)
        if trainer.state.stage != RunningStage.TRAINING or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        limit, needed = trainer.limit_train_batches, batches_until_the_end(trainer)
        if (combined := self._training_loaders.combined) is not None:
            combined.add(dataloader, self._comm, policy=self.options.uneven, limit=limit, needed=needed)
            return dataloader
        return agree_on_batches(dataloader, self._comm, self.options.uneven, limit=limit, needed=needed)

    def _begin_batch(self, trainer: pl.Trainer, reducer: Reducer, batch_idx: int) -> None:
        self._turns.find_loader(trainer)
        reducer.active_ranks = self._turns.take(batch_idx, trainer.accumulate_grad_batches)
        self._track_new_parameters(reducer, replicate=True)

    def _track_new_parameters(self, reducer: Reducer, *, replicate: bool = False) -> None:
        """Parameters added or thawed after the start (fine-tuning callbacks): in the optimizer, not in a bucket yet.

        ``replicate`` gives all ranks rank 0's values of them; only before forward, which keeps them for backward.
        """
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        if all(reducer.is_tracked(param) or not param.requires_grad for param in params):
            return
        assert self.model is not None
        new = reducer.track(self.model.named_parameters())
        if self._sharding is not None:
            self._sharding.follow_module()
        if replicate and self._comm is not None:
            broadcast_tensors(new, self._comm)

    # -- forward, backward, step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        self._stand_in.in_use = False
        plain = not module.automatic_optimization and not self._calls_manual_backward
        with self._reporting_failures(), self._turns.step(module), self._plain_backwards(reduced=plain):
            output = super().training_step(*args, **kwargs)
        has_data = self._turns.has_data
        if self._reducer is None or not module.automatic_optimization or (output is not None and has_data):
            return output
        return self._stand_in.new(output, self.root_device, has_data=has_data, rank=self.global_rank)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        reducer = self._reducer
        if reducer is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        self._track_new_parameters(reducer)
        self.pre_backward(closure_loss)
        with self._plain_backwards(reduced=False):  # a backward in the user's hook
            closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        # gradients are averaged before the precision plugin's `post_backward`, which calls the user's
        # `on_after_backward`: there they are equal on all ranks already
        with self._reporting_failures(), reducer.backward():
            self._stand_in.repeat_backward(reducer)
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        with self._plain_backwards(reduced=False):
            closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _plain_backwards(self, *, reduced: bool) -> AbstractContextManager[None]:
        return self._reducer.plain_backwards(reduced=reduced) if self._reducer is not None else nullcontext()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._reducer is None:
            yield
            return
        with self._reducer.no_sync():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        reduced = self._reducer is not None and self._reducer.reduces_plain_backwards  # inside a manual training_step

        def closure_or_none() -> Any:
            with self._plain_backwards(reduced=reduced):
                loss = closure()
            self._check_reduced(optimizer)
            if not self._stand_in.in_use or any(
                p.grad is not None for g in optimizer.param_groups for p in g["params"]
            ):
                return loss
            return None  # no rank has a gradient: a loss scaler must not look for one

        with self._plain_backwards(reduced=False):  # a backward in on_before_optimizer_step
            return super().optimizer_step(optimizer, closure_or_none, model, **kwargs)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        reducer = self._reducer
        assert reducer is not None
        if any(reducer.is_tracked(param) for group in optimizer.param_groups for param in group["params"]):
            reducer.finish()
            if not self._has_closure(args, kwargs):
                self._check_reduced(optimizer)
            self._shard(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        reducer = self._reducer
        assert reducer is not None
        if any(reducer.is_tracked(param) for group in optimizer.param_groups for param in group["params"]):
            reducer.num_steps += 1

    def _check_reduced(self, optimizer: Optimizer) -> None:
        """No gradient that is about to be stepped is this rank's own."""
        if self._reducer is not None:
            self._reducer.check_reduced(param for group in optimizer.param_groups for param in group["params"])

    @staticmethod
    def _has_closure(args: Any, kwargs: Any) -> bool:
        """Whether ``Optimizer.step(*args, **kwargs)`` computes gradients; ``args[0]`` is the optimizer."""
        return len(args) > 1 or kwargs.get("closure") is not None

    @property
    def num_buckets(self) -> int:
        """Of gradients, as they are laid out now; the same on every rank."""
        return len(self._reducer.buckets) if self._reducer is not None else 0

    def gradient_squares(self, parameters: Sequence[Parameter]) -> Tensor:
        """What this rank adds to the squared norms of gradients, summed over ranks: of each bucket, and outside of any.

        1-D, float64. All ranks call it, with the same parameters, where gradients are averaged already.
        """
        if self._sharding is not None:
            return self._sharding.gradient_squares(parameters)
        buckets = self._reducer.buckets if self._reducer is not None else []
        return squares_by_bucket(parameters, buckets, self.world_size)

    def _progress(self) -> str:
        text, reducer = super()._progress(), self._reducer
        return f"{text} and backward {reducer.num_finished}" if text and reducer is not None else text


def _say(message: str) -> None:
    rank_zero_info(f"lightning_ring: {message}")
