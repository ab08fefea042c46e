"""An elastic fit: what `Recovery` calls in a Trainer's training."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ring.comm.communicator import Communicator
from lightning_ring.elastic.step_under_way import StepUnderWay
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.catching_up import CatchingUp
from lightning_ring.integrations.lightning.elastic.handover import hand_over_fit
from lightning_ring.integrations.lightning.elastic.host_calls import HostCalls
from lightning_ring.integrations.lightning.elastic.last_checkpoint import save_at_the_end
from lightning_ring.integrations.lightning.elastic.loss_scaler import already_unscaled, forget_unscaling
from lightning_ring.integrations.lightning.elastic.manual import OwnGradients, remember_weights
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from lightning_ring.integrations.lightning.elastic.process import Connecting, elastic_process
from lightning_ring.integrations.lightning.elastic.rank_zero_files import take_over
from lightning_ring.integrations.lightning.elastic.resize import Resize
from lightning_ring.integrations.lightning.elastic.step_undo import remember_progress, remember_step
from lightning_ring.integrations.lightning.elastic.watchers import tell_monitors
from lightning_ring.job.job import Job, adopt
from lightning_ring.job.members import own_member
from lightning_ring.job.ranks import RankInfo
from lightning_ring.membership.member import FIRST_WORLD_SIZE
from lightning_ring.membership.view import View

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


class ElasticFit:
    """The part of an `ElasticStrategy` that brings its fit from one view to the next.

    A step is done again from the first of the batches whose gradients it accumulates.

    Attributes:
        substitute: The batch that a step reads which is done again; `None` for the batch that Lightning has fetched.
        changed: Whether ranks have changed since the loader was told.
        waits_to_join: Whether this process is a newcomer that is not connected yet.
        committing: Whether a step is being finished whose averages were complete when its ranks changed.
        own_gradients: Of manual optimization.
    """

    def __init__(self, strategy: ElasticStrategy) -> None:
        options = strategy.options
        self._strategy = strategy
        limits = options.timeout, options.stall_warning
        connecting = Connecting(options.backend, strategy.root_device, *limits, options.topology)
        self.process = elastic_process(connecting, self)
        self.recovery = self.process.recovery
        self.recovery.parted = options.new_algorithm().sharded
        several = "the script has several fits" if self.process.num_fits else ""
        self.catching_up = CatchingUp(strategy, "the optimizer is sharded" if self.recovery.parted else several)
        self.calls = HostCalls(self.recovery.after)
        self.position: TrainingPosition | None = None
        self.resize = Resize(options.resize_lr)
        self.substitute: Any = None
        self.changed = False
        self.own_gradients = OwnGradients()
        self.waits_to_join = False
        self.committing = False
        self._stepping = False
        self._said_that_they_wait = False
        self._begun = False  # the batches whose gradients the next step accumulates
        self._under_way = StepUnderWay()
        self._restore_progress: Callable[[], None] = lambda: None
        self._step: Callable[[Callable[[], Any]], Any] = lambda closure: None
        self._loss: Any = None
        self._output: Any = None

    def start(self) -> None:
        """Take part in the job, or, in a newcomer, set up alone: the others go on meanwhile."""
        self.process.num_fits += 1
        self.process.fitting = True
        if not self._strategy.fit_trainer.lightning_module.automatic_optimization:
            self.catching_up.refuse("optimization is manual")
        self.catching_up.serve(self.process.member)
        if self.recovery.step is not None:
            assert self.recovery.view is not None
            self._adopt(self._job)
            self._strategy.rank_changes.of_view(self.recovery.view.members, 0, 0.0)
        elif self.process.is_newcomer:
            self._stand_alone()
        else:
            self.recovery.start()

    # -- a step

    @property
    def in_step(self) -> bool:
        """Whether batches whose gradients the next step accumulates were trained on."""
        return self._begun

    def batch_of_step(self) -> Any:
        """Before a training step: the batch that it reads in place of its own, if any."""
        if not self._stepping:
            self.substitute = None
            if not self._begun:
                self._begin()
        return self.substitute

    def take_batch(self, train: Callable[[Any], Any], batch: Any) -> Any:
        """``train(batch)``, a training_step that steps optimizers itself, as one step: done again as a whole."""

        def step(compute: Callable[[], Any]) -> Any:
            output = compute()
            if not self.committing:
                self.averages_are_complete()
            return output

        return self.take_step(step, lambda: train(batch if self.substitute is None else self.substitute))

    def take_step(self, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """``step(closure)``, which computes averages in ``closure`` and then steps the optimizer, once."""
        recovery, trainer = self.recovery, self._strategy.fit_trainer
        assert self.position is not None
        assert recovery.step is not None
        after = recovery.step + 1
        self._step = step
        self._restore_progress = remember_progress(trainer)
        self.substitute = None
        if not self._begun:
            self._begin()
        self.position.end_step()
        again = self.changed
        self._stepping = True
        try:
            if again:  # ranks changed after the first batch of several
                self.take_back()
            while True:
                if again:
                    self._under_way.begin(self._remember())
                try:
                    with self.calls.inside():
                        if again:
                            self._accumulate_again(closure)
                        output = step(lambda: self._compute(closure))
                except Exception as error:
                    recovery.after(error)
                    again = True
                    if recovery.step == after:
                        self.changed = False
                        self.position.go_on()
                        return self._output
                else:
                    recovery.committed()
                    self._under_way.finish()
                    self._complete_parameters()
                    return output
        finally:
            self._stepping = self._begun = False
            if again and trainer.accumulate_grad_batches > 1:
                self._strategy.drop_gradients()  # Lightning does so at multiples of that number of batches

    def averages_are_complete(self) -> None:
        """After the hooks that may change averages: from here on the step needs no other rank. Collective."""
        self._strategy.algorithm.before_commit()
        self.recovery.complete = True
        self.recovery.agree()

    def before_update(self) -> None:
        """Gradients are final, and the optimizer takes its step with them, whatever becomes of other ranks."""
        assert self.recovery.step is not None
        members = self.recovery.view.members if self.recovery.view is not None else ()
        self.catching_up.source.update(self.recovery.step + 1, members)

    def _begin(self) -> None:
        assert self.position is not None
        if self.changed:
            self.changed, self.substitute = False, self.position.read_again()
        self.position.begin_step()
        self._under_way.begin(self._remember())
        self._begun = True
        assert self.recovery.step is not None
        self.catching_up.source.hold_still(self.recovery.step)

    def _remember(self) -> Callable[[], None]:
        """What undoes the step that begins."""
        trainer, strategy = self._strategy.fit_trainer, self._strategy
        restore = remember_step(trainer, strategy.fit_model)
        if trainer.lightning_module.automatic_optimization:
            return restore
        self.own_gradients.begin_step(strategy.optimizers)
        restore_weights = remember_weights(strategy)

        def restore_all() -> None:
            restore_weights()
            restore()

        return restore_all

    def _accumulate_again(self, closure: Callable[[], Any]) -> None:
        """The batches of this step, from its first one, with the ranks that there are now; all but the last batch's
        gradients."""
        assert self.position is not None
        self.changed = False
        self._strategy.drop_gradients()
        self.substitute = self.position.go_back()
        for _ in range(self.position.num_batches - 1):
            with self._strategy.block_backward_sync():
                closure()
            self.substitute = self.position.fetch()

    def _compute(self, closure: Callable[[], Any]) -> Any:
        self._loss = closure()
        return self._loss

    def _complete_parameters(self) -> None:
        try:
            with self.calls.inside():
                self._strategy.algorithm.after_commit()
        except Exception as error:
            self._stepping = False  # the step is finished
            self.recovery.after(error)  # which completes them in another way
            assert self.position is not None
            self.changed = False
            self.position.go_on()

    def save_at_the_end(self) -> None:
        """Save what this rank has finished, where the job ends because it had too few ranks for too long."""
        if self.recovery.step is not None:  # else it has not joined yet
            save_at_the_end(self._strategy, self.process, take_back=self._under_way.take_back)

    # -- newcomers

    def let_in_newcomers(self) -> None:
        """Between two steps, where all ranks have agreed to it. Collective."""
        self.recovery.pause()

    def join(self) -> None:
        """Take part, with the state of the others, before the batch that they train on next."""
        assert self.position is not None
        self.catching_up.run(self.process.member)
        self.position.join()
        dist.destroy_process_group()
        self.recovery.start()
        self.waits_to_join = False

    def _stand_alone(self) -> None:
        number = self.process.member.number
        # as many ranks as the others had in their set-up, from which scripts compute the batch of a rank
        size = max(2, int(os.environ.get(FIRST_WORLD_SIZE, "1")))
        info = RankInfo(size - 1, size, size - 1, size, 0, 1, "ringrun")  # not rank 0: it writes no files
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        device = self.process.connecting.device
        self._adopt(Job(info, [own_member(info, number, device)], store, None, device))
        self.waits_to_join = True

    # -- called by the recovery

    def welcomes_newcomers(self) -> bool:
        if self.process.num_fits > 1 and not self._said_that_they_wait:
            self._said_that_they_wait = True
            rank_zero_warn(
                f"lightning_ring: a process waits to join, and cannot: this is fit number {self.process.num_fits} of "
                "the script, and it would have to do the earlier ones again. It ends with the job. Give each fit a "
                "script of its own where dead ranks are to be replaced in it."
            )
        return self._has_room_for(self._strategy.world_size + 1)

    def admits(self, ranks: int) -> bool:
        return self.recovery.pausing and self._has_room_for(ranks)

    def _has_room_for(self, ranks: int) -> bool:
        return self.process.num_fits == 1 and self.position is not None and self.position.has_batches_for(ranks)

    def commit(self) -> None:
        self.committing = True  # the hooks have run, and gradients are clipped
        try:
            with self.calls.inside(), already_unscaled(self._strategy.precision_plugin):
                self._output = self._step(lambda: self._loss)
        finally:
            self.committing = False
        self._under_way.finish()

    def take_back(self) -> None:
        if self._stepping:  # else the step finds out that ranks have changed, and does its batches again
            self._under_way.take_back()
            self._restore_progress()
            forget_unscaling(self._strategy.precision_plugin)

    def enter(self, view: View, comm: Communicator) -> None:
        strategy = self._strategy
        joins = self.waits_to_join
        if joins and self.process.member.number not in view.newcomers:
            raise ConfigurationError(
                f"Process {self.process.member.number} took the place of one that died before the training began, and "
                "cannot join it now. Start the job again."
            )
        if joins:
            self.catching_up.finish(view.step or 0, self.process.member)
        was_rank_zero = self.recovery.step is None or strategy.is_global_zero
        self._adopt(self._job)
        strategy.timeline.follow(comm)
        if joins:
            strategy.attach_newcomer(comm)
        elif strategy.in_fit:
            strategy.attach_anew(comm)
        self.calls.compare(comm, joins=joins)
        if not strategy.in_fit:
            strategy.rank_changes.of_view(view.members, 0, 0.0)
            return
        trainer = strategy.fit_trainer
        if not joins and not view.last:  # a last view trains no more
            self.resize.apply(strategy, self.position, len(view.members), self.recovery.step or 0)
        if view.newcomers:
            hand_over_fit(strategy, self, comm, receives=joins)
        if view.generation == 0:
            return
        self.changed = True
        trainer.fit_loop.epoch_loop.val_loop._combined_loader = None  # its sampler has the ranks before
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
        strategy.parallel_devices = [self.process.connecting.device] * job.info.local_size
        strategy.set_world_ranks()
