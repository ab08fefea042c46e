"""An elastic fit: what `Recovery` calls in a Trainer's training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.catching_up import CatchingUp
from lightning_ring.integrations.lightning.elastic.checks import keeps_newcomers_out
from lightning_ring.integrations.lightning.elastic.handover import check_newcomers, hand_over_fit
from lightning_ring.integrations.lightning.elastic.host_calls import HostCalls
from lightning_ring.integrations.lightning.elastic.last_checkpoint import save_at_the_end
from lightning_ring.integrations.lightning.elastic.process import Connecting, elastic_process
from lightning_ring.integrations.lightning.elastic.rank_zero_files import take_over
from lightning_ring.integrations.lightning.elastic.resize import Resize
from lightning_ring.integrations.lightning.elastic.step import ElasticStep
from lightning_ring.integrations.lightning.elastic.watchers import tell_monitors
from lightning_ring.job.job import Job, adopt
from lightning_ring.job.members import own_member
from lightning_ring.job.ranks import RankInfo
from lightning_ring.membership.view import View

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


class ElasticFit:
    """The part of an `ElasticStrategy` that brings its fit from one view to the next.

    Attributes:
        step: The current one, and the position in the training data.
        waits_to_join: Whether this process is a newcomer that is not connected yet.
        first_attributes: The `plain_attributes` with which the training began on this rank.
    """

    def __init__(self, strategy: ElasticStrategy) -> None:
        options = strategy.options
        self._strategy = strategy
        limits = options.timeout, options.stall_warning
        connecting = Connecting(options.backend, strategy.root_device, *limits, options.topology)
        self.process = elastic_process(connecting, self)
        self.recovery = self.process.recovery
        self.recovery.parted = options.new_algorithm().sharded
        self.catching_up = CatchingUp(strategy, self.recovery, "")
        self.calls = HostCalls(self.recovery.after)
        self.step = ElasticStep(strategy, self.recovery, self.calls, self.catching_up.source)
        self.resize = Resize(strategy.resize_lr)
        self.waits_to_join = False
        self.first_attributes: list[dict[str, Any]] = []
        self._keeps_out = ""
        self._said_that_they_wait = False

    def start(self) -> None:
        """Take part in the job, or, in a newcomer, set up alone: the others go on meanwhile."""
        self.process.num_fits += 1
        if self.process.num_fits > 1:
            self.process.member.leave_fit(False)
        self.process.fitting = True
        trainer = self._strategy.fit_trainer
        if not trainer.lightning_module.automatic_optimization:
            self.catching_up.refuse("optimization is manual")
        self._keeps_out = keeps_newcomers_out(trainer, self.process.num_fits)
        if self._keeps_out:
            self.catching_up.refuse(self._keeps_out)
        self.catching_up.serve(self.process.member)
        if self.recovery.step is not None:
            assert self.recovery.view is not None
            self._adopt(self._job)
            self._strategy.rank_changes.of_view(self.recovery.view.members, 0, 0.0)
        elif self.process.is_newcomer:
            self._stand_alone()
        else:
            self.recovery.start()

    def save_at_the_end(self) -> None:
        """Save what this rank has finished, where the job ends because it had too few ranks for
        too long.
        """
        if self.recovery.step is not None:  # else it has not joined yet
            save_at_the_end(self._strategy, self.process, take_back=self.step.forget)

    # -- newcomers

    def let_in_newcomers(self) -> None:
        """Between two steps, where all ranks have agreed to it. Collective."""
        self.recovery.pause()

    def join(self) -> None:
        """Take part, with the state of the others, before the batch that they train on next."""
        assert self.step.position is not None
        self.catching_up.run(self.process.member)
        self.step.position.join()
        dist.destroy_process_group()
        self.recovery.start()
        self.waits_to_join = False

    def _stand_alone(self) -> None:
        number = self.process.member.number
        # as many ranks as the others had in their set-up: scripts compute batches from it, and
        # schedules their length
        size = self.process.member.first_ranks or 1
        rank = size - 1
        # not local rank 0, which prepares data: that of the others has done so
        info = RankInfo(rank, size, max(1, rank), size, 0, 1, "ringrun")
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        device = self.process.connecting.device
        self.waits_to_join = True
        self._adopt(Job(info, [own_member(info, number, device)], store, None, device))

    # -- called by the recovery

    def welcomes_newcomers(self) -> bool:
        if self._keeps_out and not self._said_that_they_wait:
            self._said_that_they_wait = True
            rank_zero_warn(
                f"lightning_ring: a process waits to join, and cannot: {self._keeps_out}"
            )
        return self._has_room_for(self._strategy.world_size + 1)

    def admits(self, ranks: int) -> bool:
        return self.recovery.pausing and self._has_room_for(ranks)

    def _has_room_for(self, ranks: int) -> bool:
        position = self.step.position
        return not self._keeps_out and position is not None and position.has_batches_for(ranks)

    def commit(self) -> None:
        self.step.commit()

    def take_back(self) -> None:
        self.step.take_back()

    def enter(self, view: View, comm: Communicator) -> None:
        strategy = self._strategy
        joins = self.waits_to_join
        if joins and self.process.member.number not in view.newcomers:
            raise ConfigurationError(
                f"Process {self.process.member.number} took the place of one that died before the "
                "training began, and cannot join it now. Start the job again."
            )
        self.catching_up.ranks_change()
        if joins:
            self.catching_up.finish(view.step or 0, self.process.member)
        was_rank_zero = self.recovery.step is None or strategy.is_global_zero
        self._adopt(self._job)
        strategy.timeline.follow(comm)
        if view.newcomers:
            # before buckets, which are those of equal models
            check_newcomers(strategy, self, comm, joins=joins)
        if joins:
            strategy.attach_newcomer(comm)
        elif strategy.in_fit:
            strategy.attach_anew(comm)
        self.calls.compare(comm, joins=joins)
        self.step.compare(comm, some_have_finished=self.process.member.training_is_over)
        if not strategy.in_fit:
            strategy.rank_changes.of_view(view.members, 0, 0.0)
            return
        trainer = strategy.fit_trainer
        missed = self.resize.missed(comm)
        if not joins and not view.last:  # a last view trains no more
            for resized in [*missed, (view.generation, len(view.members))]:
                self.resize.apply(strategy, self.step.position, resized, self.recovery.step or 0)
        if view.newcomers:
            hand_over_fit(strategy, self, comm, receives=joins)
        if view.generation == 0:
            return
        self.step.changed = True
        # its sampler has the ranks before
        trainer.fit_loop.epoch_loop.val_loop._combined_loader = None
        if strategy.is_global_zero and not was_rank_zero:
            take_over(trainer)
        changes = strategy.rank_changes
        step = view.step or 0  # a newcomer learns its own count later
        if changes.of_view(view.members, step, time.perf_counter() - self.recovery.since):
            strategy.timeline.ranks_changed(changes.latest, self.recovery.since)
            tell_monitors(trainer, changes)

    @property
    def _job(self) -> Job:
        assert self.process.generations.job is not None
        return self.process.generations.job

    def _adopt(self, job: Job) -> None:
        adopt(job)
        strategy = self._strategy
        strategy._job = job
        # Lightning takes the one at the local rank, which is 1 of 1 in a newcomer of a job that
        # began with one rank
        strategy.parallel_devices = [self.process.connecting.device] * max(
            job.info.local_size, job.info.local_rank + 1
        )
        strategy.set_world_ranks()
