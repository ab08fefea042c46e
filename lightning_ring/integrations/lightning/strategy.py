"""`RingStrategy`: translates the hooks that Lightning calls into calls of an `Algorithm`.

Begin here. Lightning calls a strategy in this order:

- ``setup_environment``: connects the ranks (`RankedStrategy`, which also has the collectives);
- ``setup``: equal parameters on all ranks, then `Algorithm.attach`, which hooks gradients;
- for each batch ``on_train_batch_start``, ``training_step``, ``backward`` (in it buckets are
  averaged) and ``optimizer_step``;
- ``validation_step`` and its like, ``save_checkpoint``, ``load_checkpoint``;
- ``teardown``: `Algorithm.detach`. The ranks stay connected.

Flags in the buckets tell a rank's requests (`StopRequests`), so that all ranks act at the same
step. A single process has no communicator.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.hooks import StepHooks
from lightning_ring.algorithms.optional import ShardsState, optimizer_state_dict
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.comm.replicate import broadcast_module, check_same_model, params_of
from lightning_ring.errors import ConfigurationError, RingError
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.sharded_gradient import sum_of_squares
from lightning_ring.host.malloc import keep_freed_memory, return_freed_memory
from lightning_ring.integrations.lightning.buffers import BufferBroadcast, broadcast_after_swap
from lightning_ring.integrations.lightning.checkpoints import (
    SavedStates,
    count_trained_batches,
    load_optimizer_states,
)
from lightning_ring.integrations.lightning.data import ActiveRanks, Policy, TrainingLoaders
from lightning_ring.integrations.lightning.optimization import (
    NoSync,
    ZeroLoss,
    calls_manual_backward,
    follow_clipping,
    leave_clipping,
)
from lightning_ring.integrations.lightning.rank_strategy import RankedStrategy
from lightning_ring.integrations.lightning.stop_requests import (
    IN_SLURM,
    StopRequest,
    StopRequests,
    ignore_in_workers,
    leave_sigterm_to_the_buckets,
    stop_signals,
)
from lightning_ring.integrations.lightning.whole_weights import (
    average_before_reading,
    complete_parameters_in_hooks,
    leave_trainer,
    show_averages,
    steps_may_overlap,
)
from lightning_ring.job.rendezvous.interfaces import withdraw_interface
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


def _evaluates(name: str) -> Any:
    """The step ``name`` of every strategy, with failures reported; raises if asked to stop."""

    def step(self: RingStrategy, *args: Any, **kwargs: Any) -> Any:
        with self._reporting_failures():
            if self._requests.pending == StopRequest.STOP and self._step_hooks is None:
                raise SIGTERMException(143)
            return getattr(DDPStrategy, name)(self, *args, **kwargs)

    return step


class RingStrategy(RankedStrategy):
    """Synchronous data-parallel training over a ring all-reduce: ``Trainer(strategy="ring")``.

    Gradients travel in flat buckets while backward runs, and are averaged over all ranks. The
    module is not wrapped. A single process communicates nothing and registers no hook.

    Args:
        backend: Library that moves gradients. ``"auto"``: NCCL on CUDA; on CPU shared memory within
            a node, and between nodes Gloo (MPI if it started the ranks and they have InfiniBand or
            the like).
        bucket_cap_mb: Bucket size in MiB, `None` for 4 on up to 16 CPU ranks and 25 elsewhere; the
            first bucket to fill takes 1 MiB, so that the wire starts early.
        topology: ``"hierarchical"`` reduces in each node first, then across nodes, so that every
            byte crosses the wire once; ``"flat"`` is one ring over all ranks. ``"auto"``:
            hierarchical on CPU where there are several nodes, each with the same number of ranks
            and more than one.
        compression: Format of gradients on the wire: ``"fp16"``, ``"bf16"``, ``"int8"``,
            ``"onebit"``, ``"terngrad"``, ``"topk"``, ``"dgc"``, ``"powersgd"`` or a `Compressor`
            for float32 gradients, ``"fp32"`` for 16-bit ones, which are then summed in float32 over
            NCCL too; `None` keeps their dtype. Parameters and buffers are never compressed.
        algorithm: How replicas are kept together: an `Algorithm`, such as
            `lightning_ring.algorithms.sharded.Sharded`, which then has its own ``bucket_cap_mb``
            and ``compression``. `None`: gradients are averaged.
        broadcast_buffers: When rank 0's buffers (BatchNorm statistics) replace the other ranks': at
            the ``"start"``, also at each training ``"epoch"``, evaluation and checkpoint, or also
            at each training ``"step"``. With ``"epoch"``, buffers other than normalization
            statistics that training changes differently on each rank are found and replaced at each
            step, with a warning.
        uneven: When ranks have different numbers of training batches: ``"error"`` names rank and
            step; with ``"join"`` gradients divide by the number of ranks with data, and a finished
            rank keeps stepping with the others.
        start_method: How plain ``python train.py`` starts its ranks: ``"popen"`` runs the script
            once a rank, through the mpirun beside this Python where there is one, and in a notebook
            forks; ``"spawn"`` and ``"fork"`` as DDP has them.
        timeout: Past it a collective that has not finished raises on every rank.
        stall_warning: After it a collective that has not finished is reported in the log.
        force_communication: Run buckets and collectives in a single process too, to measure them.
        keep_freed_memory: On CPUs, memory that a step frees stays with the process for the next
            one, from the first step to the end of `fit` (see `lightning_ring.host.malloc`). Only
            with glibc, and not where its variables are set.
        monitor: Add `lightning_ring.monitor.RingMonitor` to the Trainer's callbacks, unless there
            is one, or nothing that communicates.
        timeline: Record every rank's steps and collectives in this file (``"trace.json"``), for
            https://ui.perfetto.dev; each rank writes its own beside it. `None`: what RING_TIMELINE
            names, if anything.
        requeue_signal: In a Slurm job all ranks save a checkpoint together on this signal (``sbatch
            --signal=USR1@90`` has it sent 90 s before the time is over), and the job is queued
            again; it then goes on from there. `None`: the signal is left alone.
        accelerator, parallel_devices, checkpoint_io, precision_plugin: As every Lightning strategy
            takes them.

    Raises:
        ConfigurationError: An argument cannot work; the message says what was expected.
        RankDiscoveryError: The launcher's variables contradict each other.
    """

    strategy_name = "ring"
    _options: ClassVar[type[RingOptions]] = RingOptions
    _step_hooks: StepHooks | None = None

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        bucket_cap_mb: BucketCap = None,
        topology: Topology = "auto",
        compression: Compression | Compressor | None = None,
        algorithm: Algorithm | None = None,
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
        given = locals()
        kind = self._options
        options = kind(**{option.name: given[option.name] for option in fields(kind)})
        super().__init__(
            options,
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
        )
        self.algorithm = Algorithm()
        self._recorded: RecordedCommunicator | None = None
        self._zero_loss = ZeroLoss()
        self._calls_manual_backward = False
        self._training_loaders = TrainingLoaders()
        self._requests = StopRequests(self.options.requeue_signal, self._ask_all_ranks)
        self.keeps_freed_memory = False
        self._saved_states = SavedStates()
        self._buffers = BufferBroadcast(self.options.broadcast_buffers)

    def wait_parameters(self) -> None:
        """Return when all parameters are complete. Call it before code reads parameters between
        two training steps.

        Parameters are complete in every module's forward (its own), in all hooks of callbacks and
        modules between two steps, in ``state_dict()``, and always with manual optimization.
        Elsewhere reading one may be an error: in ``training_step`` before its module was called,
        and in other threads. With ``strategy="ring"`` parameters are always complete.
        """
        self.algorithm.wait_parameters()

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Scale gradients so that their norm over all ``parameters`` is at most ``max_norm``;
        returns the norm before.

        As `torch.nn.utils.clip_grad_norm_`, for sharded gradients too. All ranks call it, with the
        same parameters. ``gradient_clip_val`` and ``self.clip_gradients`` call it.
        """
        return self.algorithm.clip_grad_norm_(parameters, max_norm, norm_type)

    def gradient_squares(self, parameters: Sequence[Parameter]) -> Tensor:
        """This rank's part of the squared norm of gradients. 0-d, float64.

        All ranks call it with the same parameters, after gradients are averaged.
        """
        ranks = 1 if self.algorithm.steps_alone else self.world_size
        return sum_of_squares(parameters, ranks)

    def setup_environment(self) -> None:
        if self._step_hooks is not None and self._trainer is not None:
            called = self._trainer.state.fn
            raise ConfigurationError(
                f"trainer.{called.value if called else 'fit'} was called inside trainer.fit on "
                f"rank {self.global_rank}. A Trainer has one loop, and its ranks one communicator, "
                "for the fit. Let it validate by itself (val_check_interval, "
                "check_val_every_n_epoch), or call this on all ranks after the fit."
            )
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync:
            assert self.model is not None
            self.model = self._layer_sync.apply(self.model)
        # every strategy's set-up, which calls `_setup_model`, and then makes the optimizers
        super(DDPStrategy, self).setup(trainer)
        if fitting and self._comm is not None:
            self._attach(trainer, self._comm)
        if fitting:
            self.timeline.prepare(trainer, self._comm)

    def _setup_model(self, model: nn.Module) -> nn.Module:  # type: ignore[override]
        trainer = self._trainer
        if self._comm is not None and trainer is not None:
            check_same_model(model, self._comm)
            if not self._holds_equal_state:
                broadcast_module(model, self._comm)
            leave_trainer(trainer)
            broadcast_after_swap(trainer, self._broadcast_buffers)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._prepare_fit(trainer, model)
        return model

    def _prepare_fit(self, trainer: pl.Trainer, model: nn.Module) -> None:
        self._requests.stops_together = False
        self.algorithm = self._new_algorithm() if self._comm is not None else Algorithm()
        if not hasattr(model, "no_sync"):
            model.no_sync = NoSync(self.block_backward_sync)  # type: ignore[assignment]
        if self._comm is None:
            return
        self._training_loaders.follow(trainer)
        if self.options.monitor:
            from lightning_ring.monitor.ring_monitor import add_monitor

            add_monitor(trainer)
        if self._may_have_others:
            # a signal may have come during an evaluation before the fit
            self.algorithm.ask_to_stop(self._requests.pending != StopRequest.NONE)
            leave_sigterm_to_the_buckets(trainer)

    def _new_algorithm(self) -> Algorithm:
        return self.options.new_algorithm()

    def _attach(self, trainer: pl.Trainer, comm: Communicator) -> None:
        assert self.model is not None
        self._calls_manual_backward = calls_manual_backward(trainer.lightning_module)
        self._recorded = RecordedCommunicator(comm, self.listeners)
        follow_clipping(self.algorithm, trainer)
        if self.algorithm.steps_alone:
            average_before_reading(trainer, self._show_averages)
        self._step_hooks = StepHooks(self.algorithm)
        self.algorithm.attach(self.model, self.optimizers, self._recorded, _warn, _inform)
        if isinstance(self.algorithm, ShardsState):
            complete_parameters_in_hooks(trainer, self._wait_parameters)
        _inform(
            f"{self.world_size} ranks on {self.ring_environment.num_nodes()} node(s), gradients by "
            f"{type(comm).__name__}{self.algorithm.description()}"
        )

    @RankedStrategy.optimizers.setter  # type: ignore[attr-defined]
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Set by Lightning, and by ``trainer.optimizers = [...]`` in the middle of a training."""
        RankedStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]
        if self._step_hooks is not None:
            self.algorithm.set_optimizers(optimizers)

    def teardown(self) -> None:
        self._remove_step_hooks()  # global ones first: the rest may raise, out of memory
        self.timeline.abandon()
        self._leave_training()
        algorithm = self.algorithm
        with algorithm.states_shown() if isinstance(algorithm, ShardsState) else nullcontext():
            super().teardown()
        withdraw_interface()
        if self.keeps_freed_memory:
            self.keeps_freed_memory = False
            return_freed_memory()

    def _remove_step_hooks(self) -> None:
        if self._step_hooks is not None:
            self._step_hooks.remove()
            self._step_hooks = None

    def _leave_training(self) -> None:
        self._remove_step_hooks()
        leave_clipping(self.precision_plugin)
        if self.model is not None and isinstance(vars(self.model).get("no_sync"), NoSync):
            del self.model.no_sync  # an attribute of the user stays
        if self._trainer is not None:
            leave_trainer(self._trainer)
            self._training_loaders.release(self._trainer)
        self.algorithm.detach(wait=not self._alone)
        self._active_ranks = ActiveRanks()
        self._buffers = BufferBroadcast(self.options.broadcast_buffers)

    def process_dataloader(self, dataloader: object) -> object:
        if IN_SLURM in os.environ:
            signals = [*stop_signals(), self.options.requeue_signal]
            ignore_in_workers(dataloader, list(filter(None, signals)), self.global_rank)
        if self._comm is None or self._trainer is None:
            return dataloader
        policy: Policy = self.options.uneven if self.algorithm.steps_together else "alone"
        return self._training_loaders.prepare(dataloader, self._trainer, self._comm, policy)

    def on_train_start(self) -> None:
        self._catch_stop_signals()
        if isinstance(self.algorithm, ShardsState) and self._trainer is not None:
            self.algorithm.overlaps = steps_may_overlap(self._trainer)
        super().on_train_start()
        self.timeline.begin_training()
        keeps = self.options.keep_freed_memory and self.root_device.type == "cpu"
        if keeps and keep_freed_memory():
            self.keeps_freed_memory = True
            _inform("memory that a step frees is kept for the next one (keep_freed_memory=True)")

    def on_train_end(self) -> None:
        self._wait_parameters()
        super().on_train_end()
        self.timeline.stop()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer, comm = self._trainer, self._buffers_comm
        assert trainer is not None
        assert self.model is not None
        accumulate = trainer.accumulate_grad_batches
        self.timeline.begin_batch()
        alone = self._step_hooks is None
        if self._requests.pending if alone else self.algorithm.agreed_to_stop():
            self._requests.follow(trainer, self._comm, self._wait_parameters)
        if self._step_hooks is not None:
            joining = self._training_loaders.joining
            self.algorithm.begin_batch(self._active_ranks.take(joining, batch_idx, accumulate))
        if comm is not None:
            if self.algorithm.steps_together:
                self._buffers.before_batch(self.model, comm, batch_idx, accumulate)
            elif batch_idx == 0:
                self._buffers.before_reading(self.model, comm)
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        module = self.lightning_module
        assert module is not None
        self._zero_loss.in_use = False
        automatic = module.automatic_optimization
        plain = not automatic and not self._calls_manual_backward
        with (
            self._reporting_failures(),
            self._active_ranks.step(module),
            self.algorithm.backwards.plain_backwards(reduced=plain),
            self.algorithm.forward(wait=automatic),
        ):
            output = super().training_step(*args, **kwargs)
        has_data = self._active_ranks.has_data
        if self._step_hooks is None or not automatic or (output is not None and has_data):
            return output
        return self._zero_loss.new(
            output, self.root_device, has_data=has_data, rank=self.global_rank
        )

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if self._step_hooks is None:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        module, plugin, algorithm = self.lightning_module, self.precision_plugin, self.algorithm
        assert module is not None
        self.pre_backward(closure_loss)
        # a manual training_step may catch an exception
        reporting = self._reporting_failures() if module.automatic_optimization else nullcontext()
        with algorithm.backwards.plain_backwards(reduced=False):
            closure_loss = plugin.pre_backward(closure_loss, module)
            # average before the precision plugin's `post_backward`: gradients are equal on all
            # ranks in the user's `on_after_backward`
            with reporting, algorithm.backward():
                self._zero_loss.repeat_backward(algorithm)
                plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
            closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.algorithm.backwards.no_sync():
            yield

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        algorithm = self.algorithm
        if self._step_hooks is None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        reduced = algorithm.backwards.reduces_plain_backwards  # inside a manual training_step

        def closure_or_none() -> Any:
            with algorithm.backwards.plain_backwards(reduced=reduced):
                loss = closure()
            algorithm.before_step(optimizer, has_closure=False)
            no_gradient = all(param.grad is None for param in params_of(optimizer))
            if self._zero_loss.in_use and no_gradient:
                return None  # no rank has a gradient: a loss scaler must not look for one
            return loss

        # A backward in this hook stays local.
        with algorithm.backwards.plain_backwards(reduced=False):
            return super().optimizer_step(optimizer, closure_or_none, model, **kwargs)

    def _wait_parameters(self) -> None:
        algorithm = self.algorithm
        try:
            algorithm.wait_parameters()
        except RingError as error:
            if not self._alone or not isinstance(algorithm, ShardsState):
                raise
            algorithm.show()
            _warn(
                "after the exception some parameters did not arrive from the ranks that stepped "
                f"them ({type(error).__name__}). On this rank the weights, and a checkpoint of "
                "them, mix those before and after the last step: go on from an earlier checkpoint."
            )

    def _show_averages(self) -> None:
        trainer, comm = self._trainer, self._comm
        if self._step_hooks is None or trainer is None or comm is None:
            return
        if not self.algorithm.steps_alone:
            return
        if self._alone:
            _warn(
                "after the exception the weights, and a checkpoint of them, are this rank's, and "
                "not the average of the ranks'. Go on from an earlier checkpoint."
            )
            return
        with self._reporting_failures():
            show_averages(self.algorithm, trainer, comm, self.root_device)

    def _progress(self) -> str:
        text, more = super()._progress(), self.algorithm.progress()
        return f"{text} and {more}" if text and more else text

    def on_validation_start(self) -> None:
        self._catch_stop_signals()
        self._broadcast_buffers()

    on_test_start = on_predict_start = on_validation_start

    validation_step = _evaluates("validation_step")
    test_step = _evaluates("test_step")
    predict_step = _evaluates("predict_step")

    def _broadcast_buffers(self) -> None:
        if self.model is not None and (comm := self._buffers_comm) is not None:
            self._buffers.before_reading(self.model, comm)

    @property
    def _buffers_comm(self) -> Communicator | None:
        """Ranks may wait for a late rank in broadcasts too."""
        return self._recorded if self._step_hooks is not None else self._comm

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        together = None if self._alone else self._comm
        # first: it names what a rank does alone
        self._saved_states.save_random(checkpoint, together)
        if together is not None:
            self._broadcast_buffers()  # before the algorithm's state, which may depend on them
            self._saved_states.save_algorithm(checkpoint, self.algorithm)
        if self._trainer is not None:
            count_trained_batches(checkpoint, self._trainer)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._saved_states.load(checkpoint)
        return checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._wait_parameters()
        self._show_averages()
        return super().lightning_module_state_dict()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._wait_parameters()  # values that arrive later would overwrite the loaded ones
        super().load_model_state_dict(checkpoint, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state dict of the optimizer; under ``ring_sharded`` empty except on rank 0."""
        if not self.algorithm.sharded:
            return super().optimizer_state(optimizer)
        if self._alone and not self._requests.stops_together:
            _warn(
                "a checkpoint after an exception holds no optimizer state where that is sharded "
                "(ring_sharded, ParameterServer): the other ranks, which have their shards of it, "
                "may be gone."
            )
            return {}
        return optimizer_state_dict(self.algorithm, optimizer, is_rank_zero=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint["optimizer_states"]
        comm = None if self._holds_equal_state else self._comm
        load_optimizer_states(states, self.optimizers, self.algorithm, self.root_device, comm)
        # not later: loaders draw their seeds next
        self._saved_states.restore(self.algorithm, self.global_rank, self.world_size)

    @property
    def _holds_equal_state(self) -> bool:
        return False  # bits that all ranks have loaded: nothing is left to broadcast

    @property
    def _may_have_others(self) -> bool:
        return self.world_size > 1

    def _catch_stop_signals(self) -> None:
        self._requests.catch_signals(several_ranks=self._may_have_others)

    def _ask_all_ranks(self, asked: bool) -> None:
        self.algorithm.ask_to_stop(asked)


def _warn(message: str) -> None:  # no lambda: ``start_method="spawn"`` pickles the strategy
    rank_zero_warn(f"lightning_ring: {message}")


def _inform(message: str) -> None:
    rank_zero_info(f"lightning_ring: {message}")
