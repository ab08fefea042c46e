"""`RingStrategy`: its arguments, set-up, evaluation and checkpoints; its training steps are those that it extends."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.replicate import broadcast_module, broadcast_optimizer_state, check_same_model
from lightning_ring.gradients.compression import Compressor
from lightning_ring.host.malloc import keep_freed_memory, return_freed_memory
from lightning_ring.integrations.lightning.averaged_steps import AveragedSteps
from lightning_ring.integrations.lightning.buffers import AfterSwaps, BufferBroadcast
from lightning_ring.integrations.lightning.compressor_state import CompressionState
from lightning_ring.integrations.lightning.join import Turns
from lightning_ring.integrations.lightning.loader_state import count_trained_batches
from lightning_ring.integrations.lightning.no_sync import add_no_sync, remove_no_sync
from lightning_ring.integrations.lightning.pytorch_lightning import explain_foreign_modules
from lightning_ring.integrations.lightning.random_state import RandomStates
from lightning_ring.integrations.lightning.slurm_requeue import in_slurm_job, save_and_requeue
from lightning_ring.integrations.lightning.stop_signals import (
    Request,
    leave_sigterm_to_the_buckets,
    on_requeue_signal,
    on_stop_signal,
    stop_signals,
)
from lightning_ring.integrations.lightning.worker_signals import ignore_in_workers
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


class RingStrategy(AveragedSteps):
    """Synchronous data-parallel training over a ring all-reduce: ``Trainer(strategy="ring")``.

    Gradients travel in flat buckets while backward goes on, and are averaged over all ranks. The module is not wrapped.
    One process alone communicates nothing and registers no hook.

    Args:
        backend: Who moves gradients. ``"auto"``: NCCL on CUDA; on CPU shared memory within a node, and between nodes
            Gloo (MPI if it started the ranks and they have InfiniBand or the like).
        bucket_cap_mb: Bucket size in MiB, `None` for 4 on up to 16 CPU ranks and 25 elsewhere; the first bucket to fill
            takes 1 MiB, so that the wire starts early. Or ``"auto"``: sizes that fit what the first steps show of
            backward and of the wire.
        topology: ``"hierarchical"`` reduces in each node first, then across nodes, so that every byte crosses the wire
            once; ``"flat"`` is one ring over all ranks. ``"auto"``: hierarchical on CPU where there are several nodes,
            each with the same number of ranks and more than one.
        compression: What gradients travel as: ``"fp16"``, ``"bf16"``, ``"powersgd"`` or a `Compressor`; `None` is their
            own dtype. Parameters and buffers always travel as they are.
        shard_optimizer: Each rank steps 1/N of the parameters and holds 1/N of the optimizer's state; new parameters
            arrive while the next forward goes on. ``Trainer(strategy="ring_sharded")``.
        broadcast_buffers: When rank 0's buffers (BatchNorm statistics) replace the other ranks': at the ``"start"``,
            also at each training ``"epoch"``, evaluation and checkpoint, or also at each training ``"step"``. With
            ``"epoch"``, buffers other than normalization statistics that training changes differently on each rank are
            found and replaced at each step, with a warning.
        uneven: When ranks have different numbers of training batches: ``"error"`` names rank and step; with ``"join"``
            gradients divide by the ranks that still hold data, and a finished rank keeps stepping with the others.
        start_method: How plain ``python train.py`` starts its ranks: ``"popen"`` runs the script once a rank, through
            the mpirun beside this Python where there is one; ``"spawn"`` and ``"fork"`` (notebooks) as DDP has them.
        timeout: Past it a collective that has not finished raises on every rank.
        stall_warning: After it a collective that has not finished is reported in the log.
        force_communication: Run buckets and collectives in a single process too, to measure them.
        keep_freed_memory: On CPUs, memory that a step frees stays with the process for the next one, from the first
            step to the end of `fit` (see `lightning_ring.host.malloc`). Only with glibc, and not where its variables
            are set.
        monitor: Add `lightning_ring.monitor.RingMonitor` to the Trainer's callbacks, unless there is one, or nothing
            that communicates.
        timeline: Record every rank's steps and collectives in this file (``"trace.json"``), for
            https://ui.perfetto.dev; each rank writes its own beside it. `None`: what RING_TIMELINE names, if anything.
        requeue_signal: In a Slurm job all ranks save a checkpoint together on this signal (``sbatch --signal=USR1@90``
            has it sent 90 s before the time is over), and the job is queued again; it then goes on from there. `None`:
            the signal is left alone.
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
        requeue_signal: signal.Signals | None = signal.SIGUSR1,
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
            requeue_signal=requeue_signal,
        )
        super().__init__(
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        explain_foreign_modules()
        self._request = Request.NONE
        self._keeps_freed_memory = False
        self._random_states = RandomStates()
        self._compression_state = CompressionState()
        self._buffers = BufferBroadcast(self.options.broadcast_buffers, _warn)
        self._after_swaps = AfterSwaps(self._broadcast_buffers)

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
            self._after_swaps.follow(trainer)
        if fitting:
            self.configure_ddp()
            add_no_sync(self.model, self.block_backward_sync)
            if self._comm is not None:
                self._training_loaders.follow(trainer)
            if self.options.monitor and self._comm is not None:
                add_monitor(trainer)
            if self._reducer is not None and self.world_size > 1:
                self._reducer.stop_requested = self._request != Request.NONE  # a signal during an evaluation before
                leave_sigterm_to_the_buckets(trainer)
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            _optimizers_to_device(self.optimizers, self.root_device)
            self._follow_optimizers(trainer)
            self.timeline.prepare(trainer, self._comm)

    def teardown(self) -> None:
        self.timeline.abandon()
        if self.model is not None:
            remove_no_sync(self.model)
        if self._trainer is not None:
            self._after_swaps.leave(self._trainer)
        super().teardown()
        self._turns = Turns()
        self._buffers = BufferBroadcast(self.options.broadcast_buffers, _warn)
        if self._keeps_freed_memory:
            self._keeps_freed_memory = False
            return_freed_memory()

    # -- training

    def on_train_start(self) -> None:
        self._catch_stop_signals()
        super().on_train_start()
        self.timeline.begin_training()
        if self.options.keep_freed_memory and self.root_device.type == "cpu":
            self._keeps_freed_memory = keep_freed_memory()
        if self._keeps_freed_memory:
            rank_zero_info("lightning_ring: memory that a step frees is kept for the next one (keep_freed_memory=True)")

    def on_train_end(self) -> None:
        super().on_train_end()
        self.timeline.stop()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.timeline.begin_batch()
        if self._comm is None and self._trainer is not None and self._request != Request.NONE:
            self._follow_requests(self._trainer)
        if self._reducer is not None and self._trainer is not None:
            if self._reducer.agreed_to_stop():
                self._follow_requests(self._trainer)
            self._begin_batch(self._trainer, self._reducer, batch_idx)
        if self.model is not None and (comm := self._buffers_comm) is not None:
            accumulate = self._trainer.accumulate_grad_batches if self._trainer is not None else 1
            self._buffers.before_batch(self.model, comm, batch_idx, accumulate)
        super().on_train_batch_start(batch, batch_idx)

    def process_dataloader(self, dataloader: object) -> object:
        if in_slurm_job(os.environ):
            requeue_signal = self.options.requeue_signal
            signals = [*stop_signals(), *([requeue_signal] if requeue_signal else [])]
            ignore_in_workers(dataloader, signals, self.global_rank)
        return super().process_dataloader(dataloader)

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
        self._broadcast_buffers()

    def _broadcast_buffers(self) -> None:
        if self.model is not None and (comm := self._buffers_comm) is not None:
            self._buffers.before_reading(self.model, comm)

    @property
    def _buffers_comm(self) -> Communicator | None:
        """In a fit listeners are told of broadcasts: here, too, the others wait for a rank that is late."""
        return self._recorded if self._reducer is not None else self._comm

    # -- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        together = None if self._alone else self._comm
        if together is not None:
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
        if in_slurm_job(os.environ) and self.options.requeue_signal is not None:
            on_requeue_signal(self.options.requeue_signal, self._ask_to_requeue)

    def _ask_to_stop(self) -> None:
        self._ask(Request.STOP)

    def _ask_to_requeue(self) -> None:
        self._ask(Request.REQUEUE)

    def _ask(self, request: Request) -> None:
        self._request = max(self._request, request)
        if self._reducer is not None:
            self._reducer.stop_requested = True

    def _follow_requests(self, trainer: pl.Trainer) -> None:
        """Do together what some rank was asked for, between two batches. Collective."""
        mine = Request.STOP if trainer.received_sigterm else self._request  # a single rank's SIGTERM is Lightning's
        asked = max(self._comm.all_gather_object(mine)) if self._comm is not None else mine
        if self._request == mine and asked != Request.STOP:
            self._request = Request.NONE
            if self._reducer is not None:
                self._reducer.stop_requested = False
        if asked == Request.NONE:  # a flag that was under way when the request was met
            return
        self._make_whole()
        if asked == Request.STOP or save_and_requeue(trainer):
            self._stopping_together = True
            raise SIGTERMException(143)  # 128 + SIGTERM, on every rank at the same step

    def _stop_if_asked(self) -> None:
        if self._request == Request.STOP and self._reducer is None:
            raise SIGTERMException(143)


def _warn(message: str) -> None:  # no lambda: ``start_method="spawn"`` pickles the strategy
    rank_zero_warn(f"lightning_ring: {message}")
