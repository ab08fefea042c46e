"""Images per second of training, on the progress bar and in the logs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_ring.monitor.failures import LeftOut


def first_dimension(batch: Any) -> int:
    """Length of the first tensor in ``batch`` (any nesting of tuples, lists and dicts).

    Raises:
        TypeError: There is no tensor with a batch dimension.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise TypeError(
        f"There is no tensor with a batch dimension in a batch of type {type(batch).__name__}, by which to count its "
        "images. Give the callback batch_size=, a function from a batch to its number of images."
    )


class ThroughputMonitor(Callback):
    """Logs ``images_per_second`` over all ranks: images of the last ``window`` batches by the time they took.

    Time for data, forward, backward, communication and optimizer counts. Validation and what happens between epochs
    (most checkpoints, for instance) do not, nor do the first ``warmup`` batches of a fit. Ranks are taken to have
    batches of one size, as in every step but the last of an uneven epoch, so nothing is communicated.

    The clock is the host's, and nothing waits for the device (Lightning's own monitor synchronizes CUDA every step). On
    CUDA the host runs ahead of the device by a bounded queue, so a window of many steps is right and one step is not.

    Args:
        window: Batches averaged over.
        warmup: Batches left out at the start of a fit.
        batch_size: From a batch to its number of images; default `first_dimension`.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        window: int = 50,
        warmup: int = 5,
        batch_size: Callable[[Any], int] = first_dimension,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if window < 1 or warmup < 0:
            raise ValueError(f"ThroughputMonitor needs window >= 1 and warmup >= 0, got {window} and {warmup}.")
        self.warmup = warmup
        self.batch_size = batch_size
        self.clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._seen = 0
        self._since: float | None = None
        self._left_out = LeftOut(("images_per_second",))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps.clear()
        self._seen = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = self.clock()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._since is None:
            self._since = self.clock()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = self.clock()
        seconds, self._since = now - (now if self._since is None else self._since), now
        self._seen += 1
        if self._seen <= self.warmup:
            return
        images = self._left_out.run("images_per_second", None, self.batch_size, batch)
        if images is None:
            return
        self._steps.append((seconds, images))
        # Four digits, because tqdm shows 4182.3 as 4.18e+3. A tensor on the CPU, because Lightning would put a number
        # on the module's device, and reading it back would wait.
        rate = torch.tensor(float(f"{self.images_per_second * trainer.world_size:.4g}"))
        pl_module.log("images_per_second", rate, on_step=True, on_epoch=False, prog_bar=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._since = None

    @property
    def images_per_second(self) -> float:
        """This rank's images per second over the window; 0 while warming up."""
        seconds = sum(seconds for seconds, _ in self._steps)
        return sum(images for _, images in self._steps) / seconds if seconds > 0 else 0.0
