"""`ElasticStrategy`: a `RingStrategy` whose fit goes on when ranks die."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import zip_longest
from typing import Any, ClassVar, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.trainer.states import RunningStage, TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import SurvivesDeaths
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.data.sampling.sampler import OrderedSampler
from lightning_ring.elastic.membership import TooFewRanks
from lightning_ring.elastic.rank_changes import RankChanges
from lightning_ring.errors import ConfigurationError
from lightning_ring.host.random_state import remember_random_state
from lightning_ring.integrations.lightning.elastic.calls import gathering_through
from lightning_ring.integrations.lightning.elastic.checkpoints import (
    RestOfCheckpoint,
    plain_attributes,
)
from lightning_ring.integrations.lightning.elastic.checks import (
    check_arguments,
    check_batches,
    check_fit,
)
from lightning_ring.integrations.lightning.elastic.entering import EnteringLauncher
from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
from lightning_ring.integrations.lightning.elastic.loops import change_loops, with_ordered_sampler
from lightning_ring.integrations.lightning.elastic.position import (
    TrainingPosition,
    rewind_loaders,
)
from lightning_ring.integrations.lightning.elastic.resize import ResizeLR, stay_at_the_end
from lightning_ring.integrations.lightning.elastic.watchers import names_of, take_names
from lightning_ring.integrations.lightning.strategy import RingStrategy, _inform, _warn
from lightning_ring.integrations.ranks.environment import leave_start_up_messages_to_rank_0
from lightning_ring.integrations.ranks.launcher import RingLauncher
from lightning_ring.job.launchers import started_by_steward
from lightning_ring.job.members import nodes_of
from lightning_ring.launch.elastic import ElasticLimits
from lightning_ring.monitor.terminal import widen_terminal
from lightning_ring.options import RingOptions

T = TypeVar("T")


class _ElasticOptions(RingOptions):
    caller: ClassVar[str] = "ElasticStrategy"


class ElasticStrategy(RingStrategy):
    """Ranks that a steward started train on when one of them dies, and take in new ones:
    ``Trainer(strategy="ring_elastic")``.

    A death is survived from the fit's set-up to its end: in a step, in Lightning's collectives
    between steps, in validation and in saving. In test, predict and your own collectives between
    steps it ends the job. When a process joins, all ranks enter the fit again from a checkpoint in
    memory.

    Args:
        min_ranks: With fewer ranks for longer than ``wait_for_ranks`` the fit saves a checkpoint
            and ends.
        resize_lr: What becomes of learning rates when the number of ranks changes: ``"keep"``,
            ``"linear"`` or ``"sqrt"`` in it, or a function that returns the factor for (old, new)
            numbers of ranks.
        wait_for_ranks: How long the fit waits for ranks.
        of_ring: The other arguments, those of `RingStrategy`.

    Attributes:
        rank_changes: Counts deaths and joins.

    Raises:
        ConfigurationError: The fit needs something that a death would destroy, or that is not
            written yet.
    """

    strategy_name = "ring_elastic"
    _options = _ElasticOptions

    def __init__(
        self,
        *,
        min_ranks: int = 1,
        resize_lr: ResizeLR = "keep",
        wait_for_ranks: timedelta = timedelta(minutes=10),
        **of_ring: Any,
    ) -> None:
        super().__init__(**of_ring)
        self.min_ranks, self.resize_lr, self.wait_for_ranks = min_ranks, resize_lr, wait_for_ranks
        check_arguments(self)
        self.rank_changes = RankChanges()
        self._fit: ElasticFit | None = None
        self._given: Any = None  # ``ckpt_path`` of the fit
        self._first_progress: dict[str, Any] = {}
        self._restore_random: Callable[[], None] | None = None
        self._in_fit = ExitStack()  # what the fit has changed in Trainer and module
        self._holds_whole_states = False
        self._sanity_steps: int | float = 0
        self._blocked: ExitStack | None = None  # in a backward whose gradients are accumulated

    def _configure_launcher(self) -> None:
        started_by_steward(os.environ)  # refuses launchers that end all ranks with one
        super()._configure_launcher()

    def _choose_launcher(self, num_nodes: int) -> Any:
        if started_by_steward(os.environ):
            return EnteringLauncher(self)
        if _IS_INTERACTIVE:
            raise ConfigurationError(
                "An elastic strategy was built in an interactive session, in which no process can "
                "outlive the ranks. Write a script and run `python train.py` or `ringrun "
                "--min-ranks 1 python train.py`, or use strategy='ring'."
            )
        leave_start_up_messages_to_rank_0()
        ranks, seconds = self.num_processes, self.wait_for_ranks.total_seconds()
        limits = ElasticLimits(ranks, self.min_ranks, wait_for_ranks=seconds)
        return RingLauncher(self.ring_environment, ranks, num_nodes, use_mpi=False, limits=limits)

    def _new_algorithm(self) -> Algorithm:
        made = super()._new_algorithm()
        if isinstance(made, SurvivesDeaths):
            made.mirrors_shards = True
        return made

    @property
    def _may_have_others(self) -> bool:
        return True

    @contextmanager
    def entering(self, trainer: pl.Trainer, given: Any) -> Iterator[None]:
        """Around a fit. ``given``: its ``ckpt_path``."""
        self._fit, self._given = None, given
        self._first_progress = trainer.fit_loop.state_dict()
        try:
            yield
        finally:
            self._first_progress = {}

    @property
    def current_fit(self) -> ElasticFit | None:
        return self._fit

    def leave_loops(self, fit: ElasticFit) -> None:
        """Take back what an entry into ``fit`` has set up. Calls no hook."""
        trainer, loop = self.fit_trainer, self.fit_trainer.fit_loop
        joins, fit.waits_to_join = fit.waits_to_join, False
        self._restore_random = remember_random_state() if self.in_fit and not joins else None
        self._in_fit.close()
        fit.step.position = None
        self._leave_training()
        self.optimizers, self.lr_scheduler_configs = [], []
        self.drop_gradients()  # a checkpoint holds none
        for metric in (part for part in self.fit_model.modules() if isinstance(part, Metric)):
            # a module cannot be copied with parts of a graph
            metric._forward_cache = metric._computed = None
        if not trainer.training:  # a rank has died in a validation
            loop.epoch_loop.val_loop._module_mode.restore(trainer.lightning_module)
        rewind_loaders(trainer)
        loop.teardown()
        # set-up finds counts as in a new process
        loop.load_state_dict(copy.deepcopy(self._first_progress))
        loop.restarting = False
        trainer._logger_connector.teardown()
        trainer._signal_connector.teardown()
        trainer.training = self.timeline.lets_in = True
        if not fit.entered:
            self.timeline.abandon()
            return
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ProgressBar):
                callback.on_train_end(trainer, trainer.lightning_module)

    def setup_distributed(self) -> None:
        reset_seed()
        widen_terminal()
        if self._fit is None:
            fit = self._fit = ElasticFit(self, self._given)
            fit.start()
            timeline, process = self.timeline, fit.process
            timeline.number, timeline.waits = process.member.number, fit.waits_to_join
            timeline.call_together = self._call
        self._process_group_backend = dist.get_backend()

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self._rest is None:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        self._saved_states.load(self._rest.of_lightning)
        return self._rest.of_lightning

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict=strict)
        if self._rest is not None:
            self._rest.restore_flags(self.fit_model)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._restore_random is not None:
            self._restore_random()

    @property
    def _rest(self) -> RestOfCheckpoint | None:
        return self._fit.rest if self._fit is not None else None

    @property
    def _holds_equal_state(self) -> bool:
        return self._rest is not None

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        fit = self._fit
        if trainer.state.fn != TrainerFn.FITTING or fit is None:
            return
        check_fit(trainer)
        if fit.waits_to_join:
            # the others have done it, or do it with this process
            self._sanity_steps, trainer.num_sanity_val_steps = trainer.num_sanity_val_steps, 0
        else:
            trainer.num_sanity_val_steps = self._sanity_steps or trainer.num_sanity_val_steps
            self._sanity_steps = 0
            fit.resize.finish_step(fit.rest.learning_rates_for if fit.rest else self.world_size)

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self._trainer
        if trainer is not None and trainer.state.stage == RunningStage.TRAINING:
            dataloader = with_ordered_sampler(dataloader)
            sampler, fit = getattr(dataloader, "sampler", None), self._fit
            if isinstance(sampler, OrderedSampler) and fit is not None and fit.waits_to_join:
                # an epoch has as many steps as for the others
                sampler.presumed = self.global_rank, self.world_size
        return super().process_dataloader(dataloader)

    def set_world_ranks(self) -> None:
        super().set_world_ranks()
        if self._waits_to_join:  # else it would write files where the training began with one rank
            rank_zero_only.rank = fabric_rank_zero_only.rank = max(1, self.global_rank)  # type: ignore[attr-defined]

    @property
    def is_global_zero(self) -> bool:
        return super().is_global_zero and not self._waits_to_join

    @property
    def _waits_to_join(self) -> bool:
        return self._fit is not None and self._fit.waits_to_join

    @property
    def _comm(self) -> Communicator | None:
        """Also with one rank: others may come."""
        return self._job.communicator if self._job is not None else None

    def attach_anew(self, comm: Communicator) -> None:
        self._move(comm)
        self.algorithm.detach(wait=False)
        self.drop_gradients()
        self._recorded = RecordedCommunicator(comm, self.listeners)
        self.algorithm.attach(self.fit_model, self.optimizers, self._recorded, _warn, _inform)
        if self._blocked is not None:
            self._blocked.enter_context(self.algorithm.backwards.no_sync())

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """As for every strategy; also for the ranks after a death inside."""
        with ExitStack() as blocked:
            self._blocked = blocked
            blocked.callback(setattr, self, "_blocked", None)
            blocked.enter_context(self.algorithm.backwards.no_sync())
            yield

    @property
    def connected(self) -> Communicator:
        assert self._comm is not None
        return self._comm

    @property
    def survivor(self) -> SurvivesDeaths:
        """The algorithm of this fit, or of the next."""
        if isinstance(self.algorithm, SurvivesDeaths):
            return self.algorithm
        algorithm = self._new_algorithm()
        assert isinstance(algorithm, SurvivesDeaths)  # the options have checked it
        return algorithm

    def _move(self, comm: Communicator) -> None:
        self.survivor.move(comm)
        self._place_mirrors()

    def _place_mirrors(self) -> None:
        """On another host, if possible."""
        assert self._job is not None
        nodes = nodes_of(self._job.members)
        self.survivor.mirror_order = [
            rank for ranks in zip_longest(*nodes) for rank in ranks if rank is not None
        ]

    def _attach(self, trainer: pl.Trainer, comm: Communicator) -> None:
        self._place_mirrors()
        super()._attach(trainer, comm)

    def drop_gradients(self) -> None:
        """Their memory is used again."""
        for param in self.fit_model.parameters():
            param.grad = None

    @property
    def in_fit(self) -> bool:
        return self._step_hooks is not None

    @property
    def fit_trainer(self) -> pl.Trainer:
        assert self._trainer is not None
        return self._trainer

    @property
    def fit_model(self) -> nn.Module:
        assert self.model is not None
        return self.model

    @property
    def buffers_state(self) -> tuple[int, set[str]]:
        return self._buffers.state

    @buffers_state.setter
    def buffers_state(self, state: tuple[int, set[str]]) -> None:
        self._buffers.state = state

    @contextmanager
    def whole_optimizer_states(self) -> Iterator[None]:
        """Around a checkpoint of a rank that holds all shards."""
        self._holds_whole_states = True
        try:
            yield
        finally:
            self._holds_whole_states = False

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._holds_whole_states:
            return optimizer.state_dict()
        return super().optimizer_state(optimizer)

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, fit = self._trainer, self._fit
        assert trainer is not None
        if fit is None:
            return
        fit.begin_training()
        loop = trainer.fit_loop.epoch_loop
        progress = loop.batch_progress
        if loop.restarted_on_train_batch_end and progress.is_last_batch:
            # saved after an epoch's last batch; else Lightning would end the next epoch too early
            progress.current.completed = int(trainer.num_training_batches)
            trainer.fit_loop.reset_restart_stage()  # else it would not count that epoch
        position = fit.step.position = TrainingPosition(trainer)
        fit.first_attributes = fit.first_attributes or plain_attributes(trainer)
        if not fit.waits_to_join:
            own = names_of(trainer.loggers), position.batch_size
            of_ranks = self._call(lambda: self.connected.all_gather_object(own))
            check_batches([size for _, size in of_ranks])
            take_names(trainer.loggers, of_ranks[0][0])
            self._begin_to_train(fit, position)
        module = trainer.lightning_module
        self._in_fit.enter_context(gathering_through(fit.calls, lambda: self.connected, module))
        change_loops(self, fit, self._in_fit)

    def _begin_to_train(self, fit: ElasticFit, position: TrainingPosition) -> None:
        rest, fit.entered = fit.rest, True
        fit.held = fit.rest = self._restore_random = None
        step = fit.recovery.step or 0
        if rest is None:
            fit.tell_of_ranks(step)  # some may have died in the set-up
            return
        state = rest.position
        rest.restore(self)
        stay_at_the_end([config.scheduler for config in self.lr_scheduler_configs])
        fit.tell_of_ranks(step)
        fit.enters_between_batches = True
        # loader processes would keep the checkpoint's memory
        del rest
        position.enter(state)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if (
            isinstance(exception, TooFewRanks)
            and self._fit is not None
            and self._fit.step.position is not None
        ):
            self._fit.save_at_the_end()

    def teardown(self) -> None:
        fit, trainer = self._fit, self._trainer
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        if self.is_survivable and not interrupted:
            # deaths before this are handled as in a step. Nobody is later
            self.barrier()
        self._in_fit.close()
        if fit is not None:
            fit.step.position = None
            fit.process.fitting = fit.process.fitting and interrupted
            if not fit.process.fitting:
                fit.process.member.leave_fit()
            fit.process.was_stopped = self._requests.stops_together
        super().teardown()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        def start() -> None:
            super(ElasticStrategy, self).on_train_batch_start(batch, batch_idx)

        if self._buffers.sends_before(batch_idx, self.fit_trainer.accumulate_grad_batches):
            before = self.buffers_state

            def take_back() -> None:
                # else this rank counts the batch twice, and its broadcasts differ
                self.buffers_state = before

            self._call(lambda: self.and_barrier(start), take_back)
        else:
            self._call(start, counted=False)  # most batches: ranks do not wait for each other

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        plain, fit = super().training_step, self._fit
        if fit is None or not self.is_survivable:
            return plain(*args, **kwargs)
        if not self.is_automatic:
            return fit.step.take_batch(lambda batch: plain(batch, *args[1:], **kwargs), args[0])
        if (batch := fit.step.batch()) is not None:
            args = (batch, *args[1:])
        return plain(*args, **kwargs)

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        plain = super().optimizer_step
        # `take_batch` is around a manual step
        if self._fit is None or not self.in_fit or not self.is_automatic:
            return plain(optimizer, closure, model, **kwargs)
        return self._fit.step.take(
            lambda compute: plain(optimizer, compute, model, **kwargs), closure
        )

    def call_together(self, run: Callable[[], T]) -> T:
        """``run()``, which calls collectives between two steps; repeated if a rank dies in it.

        Its last collective returns on no rank before all have come to it. The result, which may be
        another rank's, has to be the same on all.
        """
        return self._call(run)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._call(lambda: super(ElasticStrategy, self).barrier(*args, **kwargs))

    def broadcast(self, obj: T, src: int = 0) -> T:
        # the source would not wait for the others
        return self._call(
            lambda: self.and_barrier(lambda: super(ElasticStrategy, self).broadcast(obj, src))
        )

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        kept = tensor.detach().clone() if self.is_survivable else None

        def run() -> Any:
            if kept is not None and not tensor.requires_grad:
                tensor.copy_(kept)  # an earlier attempt may have changed it in place
            return super(ElasticStrategy, self).reduce(tensor, group, reduce_op)

        return self._call(run)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if group is dist.group.WORLD or group not in dist.distributed_c10d._world.pg_map:
            # the default group changes after a death
            group = None

        def run() -> Tensor:
            comm = self._comm
            on_root_device = tensor.device.type == self.root_device.type
            if comm is None or group is not None or sync_grads or not on_root_device:
                return super(ElasticStrategy, self).all_gather(tensor, group, sync_grads)
            # waits in torch's Gloo group may not end when a rank dies
            return torch.stack(comm.all_gather(tensor, name="all_gather"))

        return self._call(run)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        save = super().save_checkpoint
        self._call(
            lambda: self.and_barrier(lambda: save(dict(checkpoint), filepath, storage_options))
        )

    @property
    def is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    @property
    def is_survivable(self) -> bool:
        return self._fit is not None and self._fit.step.position is not None and not self._alone

    def _call(
        self,
        run: Callable[[], T],
        again: Callable[[], None] = lambda: None,
        *,
        counted: bool = True,
    ) -> T:
        if self._fit is None or not self.is_survivable:
            return run()
        return self._fit.calls.call(run, again, counted=counted)

    def and_barrier(self, run: Callable[[], T]) -> T:
        """Nobody leaves before all have run it."""
        result = run()
        if self._comm is not None and not self._alone:
            self._comm.barrier()
        return result
