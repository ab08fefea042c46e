"""What Lightning's hooks do under ``shard_optimizer=True``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded import Sharding
from lightning_ring.errors import RingError
from lightning_ring.gradients.shard_reducer import ShardReducer
from lightning_ring.integrations.lightning.parameter_hooks import WholeParameters, watch_hooks
from lightning_ring.integrations.lightning.rank_strategy import RankedStrategy


class ShardedSteps(RankedStrategy):
    """Optimizers step this rank's shard, and parameters become whole under the next forward."""

    _sharding: Sharding | None = None
    _first_callback: WholeParameters | None = None
    _stop_watching_hooks: Callable[[], None] = staticmethod(lambda: None)
    _stopping_together = False  # all ranks leave the training loop at the same step

    def wait_parameters(self) -> None:
        """Return when all parameters are whole: before reading one in code that lightning_ring cannot see reading.

        In every module's forward its own are whole. Inside ``training_step`` and the hooks that run between two
        training steps a call of torch from Python waits for those that it is given; in all other hooks all are whole.
        What is left is scripted and compiled code that a module's own attributes and methods do not name, and threads.
        Nothing to do for ``strategy="ring"``.
        """
        if self._sharding is not None:
            self._sharding.make_whole()

    def clip_grad_norm_(self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale gradients so that their norm over all ``parameters`` is at most ``max_norm``; returns it as it was.

        What `torch.nn.utils.clip_grad_norm_` does, where each rank has its shard of the gradients. All ranks call it,
        with the same parameters. Lightning's ``gradient_clip_val`` and ``self.clip_gradients`` end here by themselves.
        """
        if self._sharding is None:
            from torch.nn.utils import clip_grad_norm_

            return clip_grad_norm_(parameters, max_norm, norm_type)
        return self._sharding.clip_grad_norm_(parameters, max_norm, norm_type)

    # -- set-up and tear-down

    @property
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Lightning sets them, and ``trainer.optimizers = [...]`` in the middle of a training."""
        RankedStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._sharding is not None and self._first_callback is not None:
            self._sharding.set_optimizers(optimizers)

    def _shard(self, optimizer: Optimizer) -> None:
        """It is about to step parameters of the model, and may have been built by hand."""
        if self._sharding is not None:
            self._sharding.slice(optimizer)

    def _shard_optimizers(self, trainer: pl.Trainer, reducer: ShardReducer) -> None:
        assert self._recorded is not None
        assert self.model is not None
        self._stopping_together = False
        self._sharding = Sharding(
            self._recorded,
            reducer,
            self.model,
            self.optimizers,
            warn=lambda message: rank_zero_warn(f"lightning_ring: {message}"),
        )
        self._first_callback = WholeParameters(self._make_whole)
        trainer.callbacks.insert(0, self._first_callback)  # type: ignore[attr-defined]
        self._see_all_parts(self.precision_plugin, self._sharding)
        if is_overridden("configure_gradient_clipping", self.lightning_module):
            rank_zero_warn(
                "lightning_ring: configure_gradient_clipping is overridden. Under ring_sharded a gradient is valid in "
                "this rank's shard only: clip with self.clip_gradients(...) or "
                "self.trainer.strategy.clip_grad_norm_(...), which see all ranks' shards; "
                "torch.nn.utils.clip_grad_norm_ does not."
            )

    def _see_all_parts(self, plugin: Precision, sharding: Sharding) -> None:
        """Norms and infinities are those of all ranks' shards."""
        if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = functools.partial(_clip_by_norm, plugin, sharding)  # type: ignore[method-assign]
        else:
            rank_zero_warn(
                f"lightning_ring: {type(plugin).__name__} clips gradients by norm in its own way. Under ring_sharded "
                "it sees this rank's shard only; use self.trainer.strategy.clip_grad_norm_(...) in it."
            )
        if (scaler := getattr(plugin, "scaler", None)) is not None:
            scaler._unscale_grads_ = sharding.unscale_parts_only(scaler._unscale_grads_)

    def teardown(self) -> None:
        if self._sharding is not None and self._first_callback is not None:
            self._stop_watching_hooks()
            self._stop_watching_hooks = lambda: None
            self._sharding.release(wait=not self._alone)
            self.precision_plugin.__dict__.pop("clip_grad_by_norm", None)
            vars(getattr(self.precision_plugin, "scaler", None) or self).pop("_unscale_grads_", None)
            if self._trainer is not None and self._first_callback in self._trainer.callbacks:  # type: ignore[attr-defined]
                self._trainer.callbacks.remove(self._first_callback)  # type: ignore[attr-defined]
            self._first_callback = None
        with self._sharding.states_shown() if self._sharding is not None else nullcontext():
            super().teardown()

    # -- training

    def on_train_start(self) -> None:
        if self._sharding is not None and self._trainer is not None:
            self._sharding.overlaps = True
            self._stop_watching_hooks()
            self._stop_watching_hooks = watch_hooks(self._trainer, self._sharding.reading, self._make_whole)
        super().on_train_start()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._sharding is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self._sharding.forward(wait=self.lightning_module.automatic_optimization):
            return super().training_step(*args, **kwargs)

    def on_train_end(self) -> None:
        self._make_whole()
        super().on_train_end()

    def _make_whole(self) -> None:
        if self._sharding is None:
            return
        try:
            self._sharding.make_whole()
        except RingError as error:
            if not self._alone:
                raise
            self._sharding.show()
            rank_zero_warn(
                "lightning_ring: after the exception some parameters did not arrive from the ranks that stepped them "
                f"({type(error).__name__}). On this rank the weights, and a checkpoint of them, mix those before and "
                "after the last step: go on from an earlier checkpoint."
            )

    # -- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._make_whole()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._make_whole()  # what is still on its way would land on what is loaded
        super().load_model_state_dict(checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The ordinary state dict of the whole optimizer; under ``ring_sharded`` on rank 0, and empty elsewhere."""
        if self._sharding is None:
            return super().optimizer_state(optimizer)
        if self._alone and not self._stopping_together:
            rank_zero_warn(
                "lightning_ring: a checkpoint after an exception holds no optimizer state under ring_sharded: the "
                "other ranks, which have their shards of it, may be gone."
            )
            return {}
        return self._sharding.of(optimizer).state_dict(is_rank_zero=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        held = [pair for pair in zip(self.optimizers, checkpoint["optimizer_states"], strict=False) if pair[1]]
        if len(held) < min(len(self.optimizers), len(checkpoint["optimizer_states"])):
            rank_zero_warn(
                "lightning_ring: the checkpoint holds no state for some of the optimizers (ring_sharded leaves it out "
                "of what is saved after an exception): those start anew."
            )
        for optimizer, state in held:
            if self._sharding is not None:
                self._sharding.of(optimizer).load_state_dict(state)
            else:
                optimizer.load_state_dict(state)
                _optimizer_to_device(optimizer, self.root_device)


def _clip_by_norm(plugin: Precision, sharding: Sharding, optimizer: Optimizer, clip_val: float) -> None:
    sharding.clip_grad_norm_(plugin.main_params(optimizer), clip_val)
