"""`RingProfile`: records what `lightning-ring plan` predicts from."""

from __future__ import annotations

import os
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_ring.comm.timing import Mark, now, seconds_between
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import synchronize
from lightning_ring.monitor.step_times import PHASES, StepRecord, StepTimer
from lightning_ring.tools.plan.inputs import Gradient, Phases, Profile, Run, write_profile


class RingProfile(Callback):
    """Writes a profile of ``steps`` training steps, after ``warmup`` others, to ``path``, for
    ``lightning-ring plan``. Training goes on as it was.

    With any strategy on one rank, with ``strategy="ring"`` on any number, of which the slowest
    rank is recorded. Raises `ConfigurationError` when training starts where the path cannot be
    written, or steps cannot be told apart (manual optimization, accumulated gradients, another
    strategy on several ranks).
    """

    def __init__(self, path: str | os.PathLike[str], steps: int = 20, warmup: int = 10) -> None:
        if steps < 1 or warmup < 0:
            raise ConfigurationError(
                f"RingProfile needs steps >= 1 and warmup >= 0, got {steps} and {warmup}."
            )
        self.path, self.steps, self.warmup = Path(path), steps, warmup
        self._hooks: dict[Tensor, RemovableHandle] = {}
        self._ready: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._steps: list[StepRecord] = []
        self._began: Mark | None = None
        self._seen = 0
        self._timer: StepTimer | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            # Before the strategy does: its own hook may send a bucket.
            self._watch(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if problem := self._problem(trainer, pl_module):
            raise ConfigurationError(f"RingProfile({str(self.path)!r}) cannot {problem}")
        self._watch(pl_module)
        self._seen = 0
        self._steps.clear()
        self._ready.clear()
        self._timer = StepTimer.attach(trainer, self._on_step)

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        records = self._timer and self._seen >= self.warmup
        self._began = now(trainer.strategy.root_device) if records else None

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self._seen += 1
        if self._timer and self._seen == self.warmup + self.steps:
            self._stop(trainer)
            self._write(trainer, pl_module)

    def on_train_end(self, *_: Any) -> None:
        if self._timer:
            rank_zero_info(
                f"lightning_ring: RingProfile wrote nothing: training ended after {self._seen} "
                f"steps, and it needs {self.warmup + self.steps} (warmup and steps)."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop(trainer)

    def _problem(self, trainer: Trainer, module: LightningModule) -> str:
        """What it cannot do; empty if nothing stands in the way."""
        batches, strategy = trainer.accumulate_grad_batches, trainer.strategy
        algorithm = getattr(strategy, "algorithm", None)
        if trainer.is_global_zero and not os.access(self.path.absolute().parent, os.W_OK):
            return "be written. Name a file in a folder that is there."
        if not module.automatic_optimization:
            return "record manual optimization: Lightning does not say when backward begins."
        if batches != 1:
            return f"record steps of several batches: accumulate_grad_batches is {batches}. Set 1."
        averages = algorithm and not algorithm.steps_alone and not algorithm.sharded
        if trainer.world_size > 1 and not averages:
            return (
                f"record {type(algorithm or strategy).__name__} on {trainer.world_size} ranks. "
                "Record with strategy='ring', or on one rank; both predict the others."
            )
        return ""

    def _watch(self, module: LightningModule) -> None:
        for name, param in module.named_parameters():
            if param.requires_grad and param not in self._hooks:
                hook = partial(self._on_gradient, name)
                self._hooks[param] = param.register_post_accumulate_grad_hook(hook)

    def _on_gradient(self, name: str, param: Tensor) -> None:
        if self._began is not None:
            self._ready[name].append((self._began, now(param.device)))

    def _on_step(self, record: StepRecord) -> None:
        if self._seen >= self.warmup:
            self._steps.append(record)

    def _stop(self, trainer: Trainer) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._timer:
            self._timer.detach(trainer, self._on_step)
        self._timer = self._began = None

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        device = strategy.root_device
        synchronize(device)
        gradients = self._gradients(module)
        steps = [record.times() for record in self._steps]
        middle = {part: median(getattr(one, part) for one in steps) for part in (*PHASES, "other")}
        # Backward ends with its last gradient, and waits for nobody.
        phases = Phases(**middle | {"backward": gradients[-1].ready})
        if trainer.world_size > 1:
            everyones = strategy.communicator.all_gather_object(
                (phases, gradients), name="profiles"
            )
            phases, gradients = max(everyones, key=lambda one: one[0].forward + one[0].backward)
        if trainer.is_global_zero:
            num_parameters = sum(param.numel() for param in module.parameters())
            environment = getattr(strategy, "ring_environment", None)
            nodes = trainer.num_nodes if environment is None else environment.num_nodes()
            run = Run(
                trainer.world_size,
                int(nodes),
                device.type,
                self.steps,
                type(module).__name__,
                num_parameters,
            )
            write_profile(Profile(run, phases, tuple(gradients)), self.path)
            rank_zero_info(
                f"lightning_ring: RingProfile wrote {self.path}. Next: lightning-ring plan "
                f"{self.path} --network 10gbit --ranks-per-node 1"
            )

    def _gradients(self, module: LightningModule) -> list[Gradient]:
        """In the order in which backward produced them. A parameter that got none still travels,
        and holds its bucket back until backward ends.
        """
        if not self._ready:
            raise ConfigurationError(
                "RingProfile saw no gradient in the steps it recorded: there is nothing to plan."
            )
        seconds = {
            name: median(seconds_between(*pair) for pair in pairs)
            for name, pairs in self._ready.items()
        }
        last, found = max(seconds.values()), []
        for name, param in module.named_parameters():
            if param.requires_grad:
                dtype, at = str(param.dtype).removeprefix("torch."), seconds.get(name, last)
                found.append(Gradient(name, param.numel(), dtype, param.nbytes, at))
        return sorted(found, key=lambda gradient: gradient.ready)
