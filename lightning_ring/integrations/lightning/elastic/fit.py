"""An elastic fit: what `Recovery` calls in a Trainer's training."""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.elastic.ending import end_job_on_error
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.member import Member
from lightning_ring.elastic.membership import View
from lightning_ring.elastic.recovery import ElasticTraining, EnterAgain, Recovery
from lightning_ring.errors import ConfigurationError, PeerFailedError, StateLostError
from lightning_ring.integrations.lightning.elastic.calls import CallsOfRank, HostCalls
from lightning_ring.integrations.lightning.elastic.checkpoints import (
    MemoryCheckpoint,
    RestOfCheckpoint,
    dump_fit,
    newest_of_rank_zero,
    save_at_the_end,
    take_attributes,
)
from lightning_ring.integrations.lightning.elastic.checks import (
    check_newcomers,
    keeps_newcomers_out,
)
from lightning_ring.integrations.lightning.elastic.resize import Resize
from lightning_ring.integrations.lightning.elastic.step import ElasticStep
from lightning_ring.integrations.lightning.elastic.watchers import take_over, tell_monitors
from lightning_ring.job.job import Job, adopt
from lightning_ring.job.members import own_member
from lightning_ring.job.ranks import RankInfo

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


@dataclass(frozen=True, slots=True)
class Connecting:
    """Arguments of `Generations`, from `RingStrategy`."""

    backend: str
    device: torch.device
    timeout: timedelta
    stall_warning: timedelta
    topology: str


class ElasticProcess:
    """Opened by the first fit. An uncaught exception then ends the job.

    Attributes:
        is_newcomer: Whether the training had begun when this process connected.
        fitting: Whether a fit is under way, so that the end of this process is no end of its
            training.
        was_stopped: Whether all ranks left a fit together, as a signal asked them to.
        num_fits: Fits that this process has begun.
    """

    def __init__(self, connecting: Connecting, training: ElasticTraining) -> None:
        self.member = Member()
        self.member.open()
        end_job_on_error(self.member)
        self.is_newcomer = bool(self.member.first_ranks)
        self.fitting = False
        self.was_stopped = False
        self.num_fits = 0
        self.connecting = connecting
        ways = (getattr(connecting, part.name) for part in fields(connecting))
        self.generations = Generations(self.member, *ways)
        self.recovery = Recovery(self.member, self.generations, training)
        self._entered = "", 0
        self._entries = 0
        atexit.register(self._say_at_exit)

    def count_entries(self, path: str, version: int) -> int:
        """How often in a row a fit has gone on from this ``version`` of a file."""
        self._entries = self._entries + 1 if self._entered == (path, version) else 1
        self._entered = path, version
        return self._entries

    def _say_at_exit(self) -> None:
        if self.was_stopped:
            self.member.fail(
                "its ranks were asked to stop (SIGTERM), and did so at the same step", 143
            )
        elif not self.fitting:
            self.member.finish()


_process: ElasticProcess | None = None


def elastic_process(connecting: Connecting, training: ElasticTraining) -> ElasticProcess:
    """This process, whose recovery now calls ``training``.

    Raises:
        ConfigurationError: It is connected already, in another way.
    """
    global _process
    if _process is None:
        _process = ElasticProcess(connecting, training)
    elif _process.connecting != connecting:
        raise ConfigurationError(
            f"The ranks of this process are connected with {_process.connecting}, and the strategy "
            f"of another fit asks for {connecting}. An elastic job connects once: give all "
            "strategies of the script the same backend, device, timeout, stall_warning and "
            "topology."
        )
    _process.recovery.training = training
    return _process


@dataclass(frozen=True, slots=True)
class FileCheckpoint:
    """A checkpoint on disk. ``path`` is as `Trainer.fit` takes it."""

    path: Any = None


@dataclass(frozen=True, slots=True)
class RankStanding:
    """Where a rank stands when ranks have changed. All ranks exchange it first.

    Attributes:
        joins: Whether it has come, and has no state yet.
        holds: Whether it holds a checkpoint from which the fit is entered again. Nobody enters
            before all hold it, so that either all ranks hold one or none has entered.
        calls: Its calls between steps.
    """

    joins: bool
    holds: bool
    calls: CallsOfRank


class ElasticFit:
    """The part of an `ElasticStrategy` that brings its fit from one view to the next.

    Attributes:
        held: The checkpoint with which all ranks enter the fit, from then until all have begun to
            train. A rank that dies meanwhile makes the others enter again.
        rest: What the checkpoint in memory holds besides Lightning's, once it is loaded.
        step: The current one, and the position in the training data.
        waits_to_join: Whether this process is a newcomer that is not connected yet.
        enters_between_batches: Whether the first batch follows one whose validation has run.
        entered: Whether this process has trained in the fit.
        first_attributes: The `plain_attributes` with which the training began on this rank.
    """

    def __init__(self, strategy: ElasticStrategy, given: Any) -> None:
        options = strategy.options
        self._strategy = strategy
        limits = options.timeout, options.stall_warning
        connecting = Connecting(options.backend, strategy.root_device, *limits, options.topology)
        self.process = elastic_process(connecting, self)
        self.recovery = self.process.recovery
        self.recovery.parted = options.new_algorithm().sharded
        self.given = given
        self.held: MemoryCheckpoint | FileCheckpoint | None = FileCheckpoint(given)
        self.rest: RestOfCheckpoint | None = None
        self.calls = HostCalls(self.recovery.after)
        self.resize = Resize(strategy.resize_lr)
        self.step = ElasticStep(strategy, self.recovery, self.calls, self.resize)
        self.waits_to_join = False
        self.enters_between_batches = False
        self.entered = False
        self.first_attributes: list[dict[str, Any]] = []
        self._offer: tuple[tuple[int, ...], dict[str, Any]] | None = None
        self._keeps_out = ""
        self._said_that_they_wait = False

    def start(self) -> None:
        """Take part in the job; a newcomer sets up alone."""
        self.process.num_fits += 1
        if self.process.num_fits > 1:
            self.process.member.leave_fit(False)
        self.process.fitting = True
        self._keeps_out = keeps_newcomers_out(self._strategy.fit_trainer, self.process.num_fits)
        if self.recovery.step is not None:
            self._adopt(self._job)
        elif self.process.is_newcomer:
            self.held = None
            self._stand_alone()
            return
        else:
            with suppress(EnterAgain):  # this rank enters the fit for the first time
                self.recovery.start()
        assert self.recovery.view is not None
        self._strategy.rank_changes.of_view(self.recovery.view.members, 0, 0.0)

    def prepare_entry(self) -> Any:
        """Before each entry. Returns its ``ckpt_path``."""
        assert self.held is not None
        trainer = self._strategy.fit_trainer
        self.rest = None
        if isinstance(self.held, MemoryCheckpoint):
            self.rest = RestOfCheckpoint(self.held.load())
            self.rest.restore_attributes(trainer, self.first_attributes)
        elif self.first_attributes:
            take_attributes(trainer, self.first_attributes)
        return self.held.path

    def begin_training(self) -> None:
        self.calls = HostCalls(self.recovery.after)
        self.step = ElasticStep(self._strategy, self.recovery, self.calls, self.resize)

    def save_at_the_end(self) -> None:
        """Save what this rank has finished, when the job ends with too few ranks."""
        if self.recovery.step is not None:  # else it has not joined yet
            save_at_the_end(self._strategy, self, take_back=self.step.forget)

    def let_in_newcomers(self) -> None:
        """Between two steps. Collective.

        Raises:
            EnterAgain: All ranks hold the checkpoint.
        """
        assert self.recovery.view is not None
        try:
            with self.calls.inside():
                checkpoint = dump_fit(self._strategy, self, self._strategy.connected)
        except Exception as error:
            self.recovery.after(error)  # they wait for the next step
            return
        self._offer = self.recovery.view.members, checkpoint
        try:
            self.recovery.pause()
        finally:
            self._offer = None

    def join(self) -> None:
        """Take part with the others' state, before their next batch.

        Raises:
            EnterAgain: This process holds their checkpoint.
        """
        assert self.step.position is not None
        self.step.position.join()
        dist.destroy_process_group()
        self.recovery.start()

    def _stand_alone(self) -> None:
        number = self.process.member.number
        # as in the others' set-up
        size = self.process.member.first_ranks or 1
        rank = size - 1
        # not local rank 0, which prepares data
        info = RankInfo(rank, size, max(1, rank), size, 0, 1, "ringrun")
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        device = self.process.connecting.device
        self.waits_to_join = True
        self._adopt(Job(info, [own_member(info, number, device)], store, None, device))

    def welcomes_newcomers(self) -> bool:
        if self._keeps_out and not self._said_that_they_wait:
            self._said_that_they_wait = True
            rank_zero_warn(
                f"lightning_ring: a process waits to join, and cannot: {self._keeps_out}"
            )
        return not self._keeps_out and self._has_batches_for(self._strategy.world_size + 1)

    def is_between(self, first_attempt: bool) -> bool:
        return not self._keeps_out and (first_attempt or self.held is not None)

    def _has_batches_for(self, ranks: int) -> bool:
        position = self.step.position
        return position is not None and position.has_batches_for(ranks)

    def commit(self) -> None:
        self.step.commit()

    def take_back(self) -> None:
        self.step.take_back()

    def enter(self, view: View, comm: Communicator) -> bool:
        strategy = self._strategy
        was_rank_zero = self.recovery.step is None or strategy.is_global_zero
        self._adopt(self._job)
        strategy.timeline.follow(comm)
        standings: list[RankStanding] = comm.all_gather_object(self._standing(), name="standings")
        if self._holds_with_others(standings, comm):
            if strategy.is_global_zero and not was_rank_zero:
                take_over(strategy.fit_trainer, trains=False)
            return True
        try:
            if strategy.in_fit:
                strategy.attach_anew(comm)
        except StateLostError as error:
            path = newest_of_rank_zero(strategy, self, error, comm)
            self._hold(FileCheckpoint(path), comm)
            return True
        self.calls.compare([standing.calls for standing in standings])
        if not strategy.in_fit:
            strategy.rank_changes.of_view(view.members, 0, 0.0)
            return False
        trainer = strategy.fit_trainer
        if view.generation == 0:
            return False
        # its sampler has the ranks before
        trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
        if strategy.is_global_zero and not was_rank_zero:
            take_over(trainer, trains=True)
        self.tell_of_ranks(view.step or 0)
        return False

    def tell_of_ranks(self, step: int) -> None:
        """Let monitors and timeline show changed ranks."""
        assert self.recovery.view is not None
        strategy, changes = self._strategy, self._strategy.rank_changes
        stood_still = time.perf_counter() - self.recovery.since
        if changes.of_view(self.recovery.view.members, step, stood_still):
            strategy.timeline.ranks_changed(changes.latest, self.recovery.since)
            tell_monitors(strategy.fit_trainer, changes)

    def _standing(self) -> RankStanding:
        return RankStanding(self.waits_to_join, self.held is not None, self.calls.of_rank())

    def _holds_with_others(self, standings: list[RankStanding], comm: Communicator) -> bool:
        """Whether all ranks hold the checkpoint now. Collective.

        Raises:
            PeerFailedError: Newcomers have to wait for another step.
        """
        joins = any(standing.joins for standing in standings)
        if not all(standing.holds for standing in standings if not standing.joins):
            # no rank has entered with the checkpoint that this one may hold
            self.held = None
            if not joins:
                return False
            self._hold(self._offered(comm), comm)
        elif joins:
            in_memory = self.held if isinstance(self.held, MemoryCheckpoint) else MemoryCheckpoint()
            on_disk = self.held if isinstance(self.held, FileCheckpoint) else None
            held = comm.broadcast_object(on_disk, name="checkpoint") or in_memory
            if isinstance(held, MemoryCheckpoint):
                held.send(comm, self._strategy.root_device)
            self._hold(held, comm)
        return True

    def _offered(self, comm: Communicator) -> MemoryCheckpoint:
        """The checkpoint of `let_in_newcomers`. Collective."""
        strategy, view = self._strategy, self.recovery.view
        assert view is not None
        held = MemoryCheckpoint()
        checkpoint: dict[str, Any] = {}
        if not self.waits_to_join:
            old = tuple(member for member in view.members if member not in view.newcomers)
            members, checkpoint = self._offer or ((), {})
            # each rank may have a part of the checkpoint
            if members != old or not self._has_batches_for(len(view.members)):
                raise PeerFailedError("New processes have to wait for another step.")
        check_newcomers(strategy, self, comm, joins=self.waits_to_join)
        held.send(comm, strategy.root_device, checkpoint if comm.rank == 0 else None)
        return held

    def _hold(self, held: MemoryCheckpoint | FileCheckpoint, comm: Communicator) -> None:
        """Nobody enters before all hold it."""
        self.held = held
        comm.barrier(name="all hold the checkpoint")

    @property
    def _job(self) -> Job:
        assert self.process.generations.job is not None
        return self.process.generations.job

    def _adopt(self, job: Job) -> None:
        adopt(job)
        strategy = self._strategy
        strategy._job = job
        # Lightning indexes by the local rank, which is 1 of 1 in a newcomer of a job of one rank
        strategy.parallel_devices = [self.process.connecting.device] * max(
            job.info.local_size, job.info.local_rank + 1
        )
        strategy.set_world_ranks()
