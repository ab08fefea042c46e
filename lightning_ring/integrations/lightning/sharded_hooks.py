"""Lightning under sharded parameters: hooks wait for all-gathers, norms of gradients cover all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded import Sharded
from lightning_ring.integrations.lightning.parameter_hooks import WaitForParameters, watch_hooks


class ShardedHooks:
    """Changes a Trainer and its precision plugin for one fit with ``algorithm``; `remove` changes them back.

    Args:
        wait_parameters: Waits for all parameters. Called before hooks of callbacks, and before a validation.
    """

    def __init__(
        self, trainer: pl.Trainer, plugin: Precision, algorithm: Sharded, wait_parameters: Callable[[], None]
    ) -> None:
        self._trainer = trainer
        self._plugin = plugin
        self._algorithm = algorithm
        self._wait_parameters = wait_parameters
        self._first_callback = WaitForParameters(wait_parameters)
        self._stop_watching: Callable[[], None] = lambda: None
        trainer.callbacks.insert(0, self._first_callback)  # type: ignore[attr-defined]
        self._see_all_shards()
        if is_overridden("configure_gradient_clipping", trainer.lightning_module):
            rank_zero_warn(
                "lightning_ring: configure_gradient_clipping is overridden. Under ring_sharded a gradient is valid in "
                "this rank's shard only: clip with self.clip_gradients(...) or "
                "self.trainer.strategy.clip_grad_norm_(...), which see all ranks' shards; "
                "torch.nn.utils.clip_grad_norm_ does not."
            )

    def begin_training(self) -> None:
        """From now on a step returns before its parameters are complete, and overridden hooks wait for them."""
        self._algorithm.overlaps = True
        self._stop_watching()
        self._stop_watching = watch_hooks(self._trainer, self._algorithm.reading, self._wait_parameters)

    def remove(self) -> None:
        self._stop_watching()
        self._stop_watching = lambda: None
        self._plugin.__dict__.pop("clip_grad_by_norm", None)
        if (scaler := getattr(self._plugin, "scaler", None)) is not None:
            vars(scaler).pop("_unscale_grads_", None)
        if self._first_callback in self._trainer.callbacks:  # type: ignore[attr-defined]
            self._trainer.callbacks.remove(self._first_callback)  # type: ignore[attr-defined]

    def _see_all_shards(self) -> None:
        """Norms, and the search for infinite gradients, cover the shards of all ranks."""
        plugin, algorithm = self._plugin, self._algorithm
        if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = functools.partial(_clip_by_norm, plugin, algorithm)  # type: ignore[method-assign]
        else:
            rank_zero_warn(
                f"lightning_ring: {type(plugin).__name__} clips gradients by norm in its own way. Under ring_sharded "
                "it sees this rank's shard only; use self.trainer.strategy.clip_grad_norm_(...) in it."
            )
        if (scaler := getattr(plugin, "scaler", None)) is not None:
            scaler._unscale_grads_ = algorithm.unscale_shards(scaler._unscale_grads_)


def _clip_by_norm(plugin: Precision, algorithm: Sharded, optimizer: Optimizer, clip_val: float) -> None:
    algorithm.clip_grad_norm_(plugin.main_params(optimizer), clip_val)
