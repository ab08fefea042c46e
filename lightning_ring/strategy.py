"""`RingStrategy`: Lightning's hooks, each a line or two onto the rooms that do the work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.comm.replicate import (
    broadcast_buffers,
    broadcast_module,
    broadcast_optimizer_state,
    broadcast_tensors,
    check_same_model,
)
from lightning_ring.compression_state import CompressionState
from lightning_ring.foreign import explain_foreign_modules
from lightning_ring.gradients import AutoBuckets, Reducer, ShardReducer, default_cap_mb
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.squares import squares_by_bucket
from lightning_ring.host_memory import keep_freed_memory, return_freed_memory
from lightning_ring.loader_state import count_trained_batches
from lightning_ring.monitor.ring_monitor import add_monitor
from lightning_ring.options import (
    Backend,
    BroadcastBuffers,
    BucketCap,
    Compression,
    RingOptions,
    StartMethod,
    Topology,
    Uneven,
)
from lightning_ring.random_state import RandomStates
from lightning_ring.sharded_steps import ShardedSteps
from lightning_ring.stopping import on_stop_signal
from lightning_ring.turns import Turns
from lightning_ring.uneven import agree_on_batches, batches_until_the_end, say_what_is_padded

log = logging.getLogger(__name__)


class RingStrategy(ShardedSteps):
    """Synchronous data-parallel training over a ring all-reduce: ``Trainer(strategy="ring")``.

    Gradients travel in flat buckets while backward goes on, and are averaged over all ranks. The module is not wrapped.
    One process alone communicates nothing and registers no hook.

    Args:
        backend: Who moves gradients. ``"auto"``: NCCL on CUDA; on CPU shared memory within a node, and between nodes
            Gloo (MPI if it started the ranks and they have InfiniBand or the like).
        bucket_cap_mb: Bucket size in MiB, `None` for 4 on CPUs and 25 on GPUs; the first bucket to fill takes 1 MiB, so
            that the wire starts early. Or ``"auto"``: sizes that fit what the first steps show of backward and of the
            wire.
        topology: ``"hierarchical"`` reduces in each node first, then across nodes, so that every byte crosses the wire
            once; ``"flat"`` is one ring over all ranks. ``"auto"``: hierarchical on CPU where there are several nodes,
            each with the same number of ranks and more than one.
        compression: What gradients travel as: ``"fp16"``, ``"bf16"``, ``"powersgd"`` or a `Compressor`; `None` is their
            own dtype. Parameters and buffers always travel as they are.
        shard_optimizer: Each rank steps 1/N of the parameters and holds 1/N of the optimizer's state; new parameters
            arrive while the next forward goes on. ``Trainer(strategy="ring_sharded")``.
        broadcast_buffers: When rank 0's buffers (BatchNorm statistics) replace the other ranks': at the ``"start"``,
            also at each training ``"epoch"``, evaluation and checkpoint, or also at each training ``"step"``.
        uneven: When ranks have different numbers of training batches: ``"error"`` names rank and step; with ``"join"``
            gradients divide by the ranks that still hold data, and a finished rank keeps stepping with the others.
        start_method: How plain ``python train.py`` starts its ranks: ``"popen"`` runs the script once a rank, through
            the mpirun beside this Python where there is one; ``"spawn"`` and ``"fork"`` (notebooks) as DDP has them.
        timeout: Past it a collective that has not finished raises on every rank.
        stall_warning: After it a collective that has not finished is reported in the log.
        force_communication: Run buckets and collectives in a single process too, to measure them.
        keep_freed_memory: On CPUs, memory that a step frees stays with the process for the next one, from the first
            step to the end of `fit` (see `lightning_ring.host_memory`). Only with glibc, and not where its variables
            are set.
        monitor: Add `lightning_ring.monitor.RingMonitor` to the Trainer's callbacks, unless there is one, or nothing
            that communicates.
        timeline: Record every rank's steps and collectives in this file (``"trace.json"``), for
            https://ui.perfetto.dev; each rank writes its own beside it. `None`: what RING_TIMELINE names, if anything.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: As every Lightning strategy takes them.

    Raises:
        ConfigurationError: An argument cannot work; the message says what was expected.
        RankDiscoveryError: The launcher's variables contradict each other.
    """

    strategy_name = "ring"

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        bucket_cap_mb: BucketCap = None,
        topology: Topology = "auto",
        compression: Compression | Compressor | None = None,
        shard_optimizer: bool = False,
        broadcast_buffers: BroadcastBuffers = "epoch",
        uneven: Uneven = "error",
        start_method: StartMethod = "popen",
        timeout: timedelta = timedelta(minutes=30),
        stall_warning: timedelta = timedelta(seconds=60),
        force_communication: bool = False,
        keep_freed_memory: bool = True,
        monitor: bool = True,
        timeline: str | Path | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        options = RingOptions(
            backend=backend,
            bucket_cap_mb=bucket_cap_mb,
            topology=topology,
            compression=compression,
            shard_optimizer=shard_optimizer,
            broadcast_buffers=broadcast_buffers,
            uneven=uneven,
            start_method=start_method,
            timeout=timeout,
            stall_warning=stall_warning,
            force_communication=force_communication,
            keep_freed_memory=keep_freed_memory,
            monitor=monitor,
            timeline=timeline,
        )
        super().__init__(
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        explain_foreign_modules()
        self._step_hooks: list[RemovableHandle] = []
        self._reducer: Reducer | None = None
        self._stand_in: Tensor | None = None
        self._repeated_loss: Tensor | None = None
        self._stop_asked = False
        self._keeps_freed_memory = False
        self._random_states = RandomStates()
        self._compressor: Compressor | None = None
        self._compression_state = CompressionState()

    # -- set-up and tear-down

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(self.model)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._comm is not None:
            check_same_model(self.model, self._comm)
            broadcast_module(self.model, self._comm)
        if fitting:
            self.configure_ddp()
            if self.options.monitor and self._comm is not None:
                add_monitor(trainer)
            self._leave_sigterm_to_the_buckets(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            for optimizer in self.optimizers if self._reducer else ():
                self._step_hooks.append(optimizer.register_step_pre_hook(self._before_step))
            if isinstance(self._reducer, ShardReducer):
                self._shard_optimizers(trainer, self._reducer)
            self.timeline.prepare(trainer, self._comm)

    def configure_ddp(self) -> None:
        """Put the gradients into buckets; the module stays unwrapped."""
        if self._comm is None:
            return
        assert self.model is not None
        self._compressor = self.options.new_compressor()
        cap, auto = self.options.bucket_cap_on(self.root_device), None
        if cap == "auto":
            cap = default_cap_mb(self.root_device.type)
            auto = AutoBuckets(self._comm, _say, default_cap_mb=cap, compressor=self._compressor)
        self._recorded = RecordedCommunicator(self._comm, self.listeners)
        self._reducer = (ShardReducer if self.options.shard_optimizer else Reducer)(
            self._recorded,
            self.model.named_parameters(),
            bucket_cap_mb=cap,
            auto=auto,
            compressor=self._compressor,
            warn=lambda message: rank_zero_warn(f"lightning_ring: {message}"),
        )
        compressed = f" as {self._compressor.name}" if self._compressor else ""
        _say(
            f"{self.world_size} ranks on {self.ring_environment.num_nodes()} node(s), gradients by "
            f"{type(self._comm).__name__}{compressed} in {len(self._reducer.buckets)} bucket(s) of up to {cap:g} MiB"
        )

    def teardown(self) -> None:
        self.timeline.abandon()
        super().teardown()
        for hook in self._step_hooks:  # an optimizer may be stepped by hand afterwards
            hook.remove()
        self._step_hooks.clear()
        if self._reducer is not None:
            self._reducer.remove()
            self._reducer = None
        self._turns = Turns()
        if self._keeps_freed_memory:
            self._keeps_freed_memory = False
            return_freed_memory()

    # -- training

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer
        if self._comm is None or trainer is None:
            return dataloader
        say_what_is_padded(dataloader, self.world_size)
        if trainer.state.stage != RunningStage.TRAINING or trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        return agree_on_batches(
            dataloader,
            self._comm,
            self.options.uneven,
            limit=trainer.limit_train_batches,
            needed=batches_until_the_end(trainer),
        )

    def on_train_start(self) -> None:
        self._catch_stop_signals()
        super().on_train_start()
        self.timeline.begin_training()
        if self.options.keep_freed_memory and self.root_device.type == "cpu":
            self._keeps_freed_memory = keep_freed_memory()
        if self._keeps_freed_memory:
            _say("memory that a step frees is kept for the next one (keep_freed_memory=True)")

    def on_train_end(self) -> None:
        super().on_train_end()
        self.timeline.stop()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.timeline.begin_batch()
        if self._reducer is not None and self._trainer is not None:
            if self._reducer.agreed_to_stop():
                self._make_whole()
                self._stopping_together = True
                raise SIGTERMException(143)  # 128 + SIGTERM, on every rank at the same step
            self._turns.find_loader(self._trainer)
            self._reducer.active_ranks = self._turns.take(batch_idx, self._trainer.accumulate_grad_batches)
            self._track_new_parameters(self._reducer, replicate=True)
        when = self.options.broadcast_buffers
        if when == "step" or (when == "epoch" and batch_idx == 0):
            self._broadcast_buffers()
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        self._stand_in = None
        with self._reporting_failures(), self._turns.step(module):
            output = super().training_step(*args, **kwargs)
        has_data = self._turns.has_data
        if self._reducer is None or not module.automatic_optimization or (output is not None and has_data):
            return output
        if has_data:
            _warn_of_none(self.global_rank)
        self._repeated_loss = None if has_data else _loss_of(output)
        # a loss that depends on nothing: its backward takes part in the reduction, with zeros
        self._stand_in = torch.zeros((), device=self.root_device, requires_grad=True)
        return self._stand_in

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        reducer = self._reducer
        if reducer is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        assert self.lightning_module is not None
        self._track_new_parameters(reducer)
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        # gradients are averaged before the precision plugin's `post_backward`, which calls the user's
        # `on_after_backward`: there they are equal on all ranks already
        with self._reporting_failures(), reducer.backward():
            self._repeat_backward(reducer)
            self.precision_plugin.backward(closure_loss, self.lightning_module, optimizer, *args, **kwargs)
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def _repeat_backward(self, reducer: Reducer) -> None:
        """On a rank that ran out of data: the collectives inside backward (`all_gather` with gradients, SyncBatchNorm)
        need this rank too; what it adds to them is zeros."""
        loss, self._repeated_loss = self._repeated_loss, None
        if loss is not None and loss.requires_grad:
            with reducer.discarding():
                loss.backward(torch.zeros_like(loss))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self._reducer is None:
            yield
            return
        with self._reducer.no_sync():
            yield

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        def closure_or_none() -> Any:
            loss = closure()
            if self._stand_in is None or any(p.grad is not None for g in optimizer.param_groups for p in g["params"]):
                return loss
            return None  # no rank has a gradient: a loss scaler must not look for one

        return super().optimizer_step(optimizer, closure_or_none, model, **kwargs)

    def gradient_squares(self, parameters: Sequence[Parameter]) -> Tensor:
        """What this rank adds to the squared norms of gradients, summed over ranks: of each bucket, and outside of any.

        1-D, float64. All ranks call it, with the same parameters, where gradients are averaged already.
        """
        if self._sharding is not None:
            return self._sharding.gradient_squares(parameters)
        buckets = self._reducer.buckets if self._reducer is not None else []
        return squares_by_bucket(parameters, buckets, self.world_size)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert self._reducer is not None
        self._reducer.finish()

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

    # -- evaluation

    def on_validation_start(self) -> None:
        self._before_evaluation()

    def on_test_start(self) -> None:
        self._before_evaluation()

    def on_predict_start(self) -> None:
        self._before_evaluation()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._reporting_failures():
            self._stop_if_asked()
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._reporting_failures():
            self._stop_if_asked()
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._reporting_failures():
            self._stop_if_asked()
            return super().predict_step(*args, **kwargs)

    def _before_evaluation(self) -> None:
        self._catch_stop_signals()
        if self.options.broadcast_buffers != "start":
            self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        if self._comm is not None and self.model is not None:
            # in a fit listeners are told: here, too, the others wait for a rank that is late
            recorded = self._recorded if self._reducer is not None else None
            broadcast_buffers(self.model, recorded or self._comm)

    # -- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        together = None if self._alone else self._comm
        if together is not None and self.options.broadcast_buffers != "start":
            self._broadcast_buffers()
        self._random_states.save(checkpoint, together)
        self._compression_state.save(checkpoint, together, self._compressor)
        if self._trainer is not None:
            count_trained_batches(checkpoint, self._trainer)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._random_states.load(checkpoint)
        self._compression_state.load(checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._comm is not None and self._sharding is None:
            for optimizer in self.optimizers:
                broadcast_optimizer_state(optimizer, self._comm)
        self._compression_state.restore(self._compressor, self.global_rank, self.world_size)
        # here, and not later: the loaders' iterators that come next draw their seeds from this state
        self._random_states.restore(self.global_rank, self.world_size)

    # -- requests to stop

    def _catch_stop_signals(self) -> None:
        # instead of Lightning's handler, which starts a collective wherever the signal happens to find the rank
        if self._comm is not None and self.world_size > 1:
            on_stop_signal(self._ask_to_stop)

    def _leave_sigterm_to_the_buckets(self, trainer: pl.Trainer) -> None:
        # Before every batch Lightning broadcasts in torch's default group whether rank 0 got a SIGTERM, and reads the
        # answer off the device. The buckets carry that already; and of ranks that take different numbers of steps one
        # would wait in that group and one in the communicator, for ever, where the communicator alone sees the error.
        if self._reducer is not None and self.world_size > 1:
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = _nothing  # type: ignore[method-assign]

    def _progress(self) -> str:
        text, reducer = super()._progress(), self._reducer
        return f"{text} and backward {reducer.num_finished}" if text and reducer is not None else text

    def _ask_to_stop(self) -> None:
        self._stop_asked = True
        if self._reducer is not None:
            self._reducer.stop_requested = True

    def _stop_if_asked(self) -> None:
        if self._stop_asked and self._reducer is None:
            raise SIGTERMException(143)


def _loss_of(output: Any) -> Tensor | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    return loss if isinstance(loss, Tensor) else None


def _say(message: str) -> None:
    rank_zero_info(f"lightning_ring: {message}")


def _nothing() -> None:
    return None


@cache
def _warn_of_none(rank: int) -> None:
    log.warning(
        "lightning_ring: training_step returned None on rank %d: for that step its gradient counts as zero, and the "
        "average still divides by all ranks.",
        rank,
    )
