"""A step of an elastic fit, which is finished, or done again, when ranks change in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning_ring.elastic.membership import View
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.elastic.undo import StepUnderWay
from lightning_ring.integrations.lightning.elastic.calls import HostCalls
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from lightning_ring.integrations.lightning.elastic.undo import (
    ChangedInSteps,
    OwnGradients,
    already_unscaled,
    forget_unscaling,
    remember_progress,
    remember_step,
    remember_weights,
)

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


@dataclass(frozen=True, slots=True)
class StepOfRank:
    """Where a rank is in a step when ranks change. Numbers of ranks are 0 where they are not known
    yet.

    Attributes:
        takes_it: Whether it is in the optimizer's step of the last step that counts.
        planned_for: Number of ranks for which it has planned the next step.
        begun_for: Number of ranks for which the loader counts in the step that it has begun.
        counts_for: Number of ranks for which the loader counts the batches of the epoch.
    """

    takes_it: bool
    planned_for: int
    begun_for: int
    counts_for: int


class ElasticStep:
    """The current step of ``strategy``'s fit. It is done again from the first batch whose gradients
    it accumulates.

    Attributes:
        position: In the training data; `None` outside of the training.
        substitute: The batch that a step reads which is done again; `None` for the batch that
            Lightning has fetched.
        changed: Whether ranks have changed since the loader was told, or this rank does its batches
            again with others.
        committing: Whether a step is being finished whose averages were complete when its ranks
            changed.
        own_gradients: Of manual optimization.
    """

    def __init__(self, strategy: ElasticStrategy, recovery: Recovery, calls: HostCalls) -> None:
        self._strategy = strategy
        self._recovery = recovery
        self._calls = calls
        self.position: TrainingPosition | None = None
        self.substitute: Any = None
        self.changed = False
        self.own_gradients = OwnGradients()
        self.committing = False
        self._stepping = False
        # For how many ranks the next step is planned: its first batch is fetched, or about to be.
        # 0: not yet
        self._planned_for = 0
        # And for how many the loader counts since the first batch of those whose gradients it
        # accumulates
        self._begun_for = 0
        self._ends: int | None = None  # the number of steps after the one that is taken
        # Where others were further than this rank when ranks changed: past the step that it takes,
        # or in the next one
        self._others_went_on = False
        self._others_count_for = self._others_planned_for = self._others_begun_for = 0
        self._under_way = StepUnderWay()
        self._changed_in_steps = ChangedInSteps()
        self._restore_progress: Callable[[], None] = lambda: None
        self._step: Callable[[Callable[[], Any]], Any] = lambda closure: None
        self._loss: Any = None
        self._output: Any = None

    def of_rank(self) -> StepOfRank:
        takes_it = self._ends is not None and self._ends == self._recovery.step
        counts_for = self.position.num_ranks if self.position is not None else 0
        return StepOfRank(takes_it, self._planned_for, self._begun_for, counts_for)

    def compare(self, of_ranks: Sequence[StepOfRank], *, some_have_finished: bool) -> None:
        """Learn where the others were when ranks changed. ``of_ranks``: of all.

        A rank that is behind plans for as many ranks as those ahead did, until it is where they
        were: for those that there are now it would plan another number of batches.
        ``some_have_finished``: ranks have finished the training, and are not among them.
        """
        takes_it = self.of_rank().takes_it
        gone_on = [one for one in of_ranks if not one.takes_it]
        self._others_went_on = takes_it and (some_have_finished or bool(gone_on))
        self._others_count_for = gone_on[0].counts_for if gone_on else 0
        # those that have planned agree
        planned = max(one.planned_for for one in of_ranks)
        begun = max(one.begun_for for one in of_ranks)
        self._others_planned_for = planned if not self._planned_for else 0
        self._others_begun_for = begun if not self._begun_for else 0

    def plan(self) -> None:
        """Before a batch is fetched: the loader learns that the number of ranks has changed, if
        a step begins.
        """
        assert self.position is not None
        if self._begun_for:
            return
        view, loop = self._view, self._strategy.fit_trainer.fit_loop.epoch_loop
        ranks = self._others_planned_for or len(view.members)
        begins_epoch = loop.batch_progress.current.ready == 0 and view.generation > 0
        if begins_epoch or self.changed:
            with self.position.for_ranks(ranks):
                if begins_epoch:
                    self.position.begin_epoch()
                else:
                    self.position.go_on()
            self.changed = self._others_planned_for > 0  # then they read the batch again
        self._planned_for, self._others_planned_for = ranks, 0

    def batch(self) -> Any:
        """Before a training step: the batch that it reads in place of its own, if any."""
        if not self._stepping:
            self.substitute = None
            if not self._begun_for:
                self._begin()
        return self.substitute

    def take_batch(self, train: Callable[[Any], Any], batch: Any) -> Any:
        """``train(batch)``, a training_step that steps optimizers itself, as one step: done
        again as a whole.
        """

        def step(compute: Callable[[], Any]) -> Any:
            output = compute()
            if not self.committing:
                self.averages_are_complete()
            return output

        return self.take(step, lambda: train(batch if self.substitute is None else self.substitute))

    def take(self, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """``step(closure)``, which computes averages in ``closure`` and then steps the
        optimizer, once.
        """
        recovery, trainer = self._recovery, self._strategy.fit_trainer
        assert self.position is not None
        assert recovery.step is not None
        self._ends = after = recovery.step + 1
        self._step = step
        self._restore_progress = remember_progress(trainer)
        self.substitute = None
        if not self._begun_for:
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
                    with self._calls.inside():
                        if again:
                            self._accumulate_again(closure)
                        output = step(lambda: self._compute(closure))
                except Exception as error:
                    recovery.after(error)
                    again = True
                    if recovery.step == after:
                        self._leave()
                        return self._output
                else:
                    recovery.committed()
                    self._planned_for = self._begun_for = 0
                    self._under_way.finish()
                    self._complete_parameters()
                    return output
        finally:
            self._stepping = False
            self._planned_for = self._begun_for = 0
            self._ends = None
            if again and trainer.accumulate_grad_batches > 1:
                # Lightning does so at multiples of that number of batches
                self._strategy.drop_gradients()

    def averages_are_complete(self) -> None:
        """After the hooks that may change averages: from here on the step needs no other rank.
        Collective.
        """
        self._strategy.survivor.before_commit()
        self._recovery.complete = True
        self._recovery.agree()

    def before_update(self) -> None:
        """Gradients are final, and the optimizer takes its step with them, whatever becomes of
        other ranks.
        """
        self._changed_in_steps.end_step()

    def _begin(self) -> None:
        assert self.position is not None
        ranks = self._planned_for or len(self._view.members)
        counts_as_they_do = 0 < self._others_begun_for == ranks
        if self.changed and not counts_as_they_do:
            ranks = self._others_begun_for or len(self._view.members)
            with self.position.for_ranks(ranks):
                self.substitute = self.position.read_again()
        # they do its batches again in its last one: this rank has to call the collectives that they
        # call
        self.changed = self._others_begun_for > 0
        self._begun_for, self._others_begun_for = ranks, 0
        self.position.begin_step(ranks_changed=self.changed)
        self._under_way.begin(self._remember())

    @property
    def _view(self) -> View:
        assert self._recovery.view is not None
        return self._recovery.view

    def _remember(self) -> Callable[[], None]:
        """What undoes the step that begins."""
        trainer, strategy = self._strategy.fit_trainer, self._strategy
        restore = remember_step(trainer, strategy.fit_model)
        if trainer.lightning_module.automatic_optimization:
            restore_changed = self._changed_in_steps.begin_step(strategy.fit_model)

            def restore_step() -> None:
                restore_changed()
                restore()

            return restore_step
        self.own_gradients.begin_step(strategy.optimizers)
        restore_weights = remember_weights(strategy)

        def restore_all() -> None:
            restore_weights()
            restore()

        return restore_all

    def _accumulate_again(self, closure: Callable[[], Any]) -> None:
        """The batches of this step, from its first one, with the ranks that there are now; all but
        the last batch's gradients."""
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
            with self._calls.inside():
                self._strategy.survivor.after_commit()
        except Exception as error:
            self._stepping = False  # the step is finished
            self._recovery.after(error)  # which completes them in another way
            self._leave()

    def _leave(self) -> None:
        """Go on after a step at whose end ranks changed."""
        assert self.position is not None
        if not self._others_went_on:
            self.changed = False
            self.position.go_on()
        elif self._others_count_for not in (0, self.position.num_ranks):
            # for so many ranks the others have found whether the epoch has another batch
            with self.position.for_ranks(self._others_count_for):
                self.position.go_on()

    def forget(self) -> None:
        """Undo the step under way, which nobody will finish."""
        self._under_way.take_back()

    # -- called by the recovery

    def commit(self) -> None:
        """Finish the step under way, whose averages are complete. Calls no collective."""
        self.committing = True  # the hooks have run, and gradients are clipped
        try:
            with self._calls.inside(), already_unscaled(self._strategy.precision_plugin):
                self._output = self._step(lambda: self._loss)
        finally:
            self.committing = False
            self._planned_for = self._begun_for = 0
        self._under_way.finish()
        # should another rank die before this one is connected again
        self._restore_progress = lambda: None

    def take_back(self) -> None:
        """Undo what the step under way has changed: it is done again."""
        # else the step finds out that ranks have changed, and does its batches again
        if self._stepping:
            self._under_way.take_back()
            self._restore_progress()
            forget_unscaling(self._strategy.precision_plugin)
