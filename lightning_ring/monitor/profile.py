"""Records what `lightning-ring plan` predicts from: when backward produces each gradient, and
what a step takes.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from lightning_ring.comm.recording import CollectiveRecord
from lightning_ring.comm.timing import Mark, now, seconds_between
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.accelerator import gpu_module, is_gpu
from lightning_ring.monitor.batch_size import first_dimension
from lightning_ring.monitor.profiled_run import (
    check_can_record,
    communicator,
    describe,
    is_sharded,
    measure_link,
)
from lightning_ring.monitor.step_record import StepRecord
from lightning_ring.monitor.step_timer import StepTimer
from lightning_ring.tools.plan.probing import (
    measure_call,
    measure_copying,
    measure_encoding,
    measure_processor,
    measure_questions,
)
from lightning_ring.tools.plan.profile import (
    Gradient,
    Model,
    Phases,
    Profile,
    fingerprint,
    write_profile,
)


class RingProfile(Callback):
    """Writes a profile of ``steps`` training steps to ``path``, for ``lightning-ring plan``.

    With any strategy on one rank, with ``ring`` and ``ring_sharded`` on any number. There the
    ranks' slowest is recorded, and where they are all on one node, or each on its own, what a
    message between them costs is measured after the last step (six sizes, each collective, a few
    times). On CPUs all ranks also try every compressor on a million gradients. Rank 0 writes the
    file. Training goes on as it was; while it records, each gradient costs a clock read (on CUDA an
    event).

    Args:
        path: The file; its folder exists.
        steps: Recorded.
        warmup: Steps before those.
        batch_size: From a batch to its number of images; default: the length of its first tensor.

    Raises:
        ConfigurationError: When training starts: the path cannot be written, or steps cannot be
            told apart (manual optimization, accumulated gradients, a sharded optimizer whose waits
            happen on a GPU).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        steps: int = 20,
        warmup: int = 10,
        batch_size: Callable[[Any], int] = first_dimension,
    ) -> None:
        if steps < 1 or warmup < 0:
            raise ConfigurationError(
                f"RingProfile needs steps >= 1 and warmup >= 0, got {steps} and {warmup}."
            )
        self.path = Path(path)
        self.steps = steps
        self.warmup = warmup
        self.batch_size = batch_size
        self._hooks: dict[Parameter, RemovableHandle] = {}
        self._ready: dict[str, list[tuple[Mark, Mark]]] = defaultdict(list)
        self._times: list[StepRecord] = []
        self._waits: list[float] = []  # of each step, for parameters of a sharded optimizer
        self._waited = 0.0
        self._began: Mark | None = None
        self._seen = 0
        self._batch_size = 0
        self._timer: StepTimer | None = None

    # -- what Lightning calls

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._watch(pl_module)  # before the strategy does: its own hook may send a bucket

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        check_can_record(self.path, trainer, pl_module)
        self._watch(pl_module)
        self._seen, self._times, self._waits = 0, [], []
        self._ready.clear()
        self._timer = StepTimer.attach(trainer)
        self._timer.listeners.append(self._on_step)
        listeners = getattr(trainer.strategy, "listeners", None)
        if listeners is not None:
            listeners.append(self._on_collective)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._recording and not self._batch_size:
            self._batch_size = self.batch_size(batch)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        self._began = now(loss.device) if self._recording else None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._timer is None:
            return
        self._seen += 1
        if self._seen == self.warmup + self.steps:
            self._stop(trainer)
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._timer is not None:
            self._stop(trainer)
            rank_zero_info(
                f"lightning_ring: RingProfile wrote nothing: training ended after {self._seen} "
                f"steps, and it needs {self.warmup + self.steps} (warmup and steps)."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop(trainer)

    # -- recording

    @property
    def _recording(self) -> bool:
        return self._timer is not None and self._seen >= self.warmup

    def _watch(self, module: LightningModule) -> None:
        for name, param in module.named_parameters():
            if param.requires_grad and param not in self._hooks:
                self._hooks[param] = param.register_post_accumulate_grad_hook(
                    partial(self._on_gradient, name)
                )

    def _on_gradient(self, name: str, param: Tensor) -> None:
        if self._began is not None:
            self._ready[name].append((self._began, now(param.device)))

    def _on_step(self, record: StepRecord) -> None:
        waited, self._waited = self._waited, 0.0
        if self._recording:
            self._times.append(record)
            self._waits.append(waited)

    def _on_collective(self, record: CollectiveRecord) -> None:
        if record.kind == "all_gather":
            self._waited += record.waited_until - record.waited_from

    def _stop(self, trainer: Trainer) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        if self._timer is not None:
            self._timer.listeners.remove(self._on_step)
            self._timer.detach(trainer)
        listeners = getattr(trainer.strategy, "listeners", [])
        if self._on_collective in listeners:
            listeners.remove(self._on_collective)
        self._timer = self._began = None

    # -- what comes out

    def _write(self, trainer: Trainer, module: LightningModule) -> None:
        comm = communicator(trainer)
        gradients = self._gradients(module)
        phases = self._phases(max(gradient.ready for gradient in gradients), trainer)
        if comm is not None:
            everyones = comm.all_gather_object((phases, gradients), name="profiles")
            phases, gradients = max(everyones, key=lambda own: own[0].forward + own[0].backward)
        level, link = measure_link(comm, trainer)
        on_gpu = is_gpu(trainer.strategy.root_device)
        costs: dict[str, Any] = {}  # of communication, to cores that compute
        if comm is not None and link is not None and not on_gpu:
            costs = {"processor": measure_processor(comm), "call": measure_call(comm)}
            costs |= {"questions": measure_questions(comm), "copying": measure_copying(comm)}
        encoding = None if on_gpu else measure_encoding(comm)
        if trainer.is_global_zero:
            parameters = list(module.named_parameters())
            digest = fingerprint(
                (name, tuple(param.shape), str(param.dtype)) for name, param in parameters
            )
            model = Model(
                type(module).__name__, digest, sum(param.numel() for _, param in parameters)
            )
            run = describe(trainer, comm, self._batch_size, self.steps)
            found = Profile(model, run, phases, tuple(gradients), level, link, encoding, **costs)
            write_profile(found, self.path)
            # without a measured one it has to be named
            network = "" if level == "network" else " --network 10gbit"
            rank_zero_info(
                f"lightning_ring: RingProfile wrote {self.path}. Next: lightning-ring plan "
                f"{self.path}{network}"
            )

    def _gradients(self, module: LightningModule) -> list[Gradient]:
        """A parameter that got none still travels, and holds its bucket back until backward
        ends.
        """
        ready = {
            name: median(seconds_between(*pair, None) for pair in pairs)
            for name, pairs in self._ready.items()
        }
        if not ready:
            raise ConfigurationError(
                "RingProfile saw no gradient in the steps it recorded: there is nothing to plan."
            )
        last = max(ready.values())
        found = []
        for name, param in module.named_parameters():
            if param.requires_grad:
                dtype = str(param.dtype).removeprefix("torch.")
                num_bytes = param.numel() * param.element_size()
                found.append(
                    Gradient(
                        name,
                        param.numel(),
                        dtype,
                        num_bytes,
                        ready.get(name, last),
                        tuple(param.shape),
                    )
                )
        return sorted(found, key=lambda gradient: gradient.ready)

    def _phases(self, backward: float, trainer: Trainer) -> Phases:
        """Medians over the steps; waits for communication are taken out of forward and backward."""
        if is_gpu(device := trainer.strategy.root_device):
            gpu_module(device).synchronize(device)
        steps = [record.times() for record in self._times]
        middle = {
            part.name: median(getattr(step, part.name) for step in steps) for part in fields(Phases)
        }
        delay = median(self._waits)
        exposed = median(max(0.0, step.backward - backward) for step in steps)
        shards = trainer.world_size if is_sharded(trainer) else 1
        return replace(
            Phases(**middle),
            forward=max(0.0, middle["forward"] - delay),
            backward=backward,
            optimizer=middle["optimizer"] * shards,
            exposed=exposed + delay if trainer.world_size > 1 else 0.0,
        )
