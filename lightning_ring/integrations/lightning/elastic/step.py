"""A step of an elastic fit, which is finished, or done again, when ranks change in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_ring.elastic.membership import View
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.elastic.undo import StepUnderWay
from lightning_ring.integrations.lightning.elastic.calls import HostCalls
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from lightning_ring.integrations.lightning.elastic.resize import Resize
from lightning_ring.integrations.lightning.elastic.undo import (
    ChangedInSteps,
    already_unscaled,
    forget_unscaling,
    remember_progress,
    remember_step,
    remember_weights,
)

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy


class ElasticStep:
    """The current step of ``strategy``'s fit.

    Ranks learn of a death at different places, but have to call the same collectives. So a step
    always begins as it was planned when the last one finished, with that step's view. A rank that
    gets its averages in a later view does it again, from the first batch whose gradients it
    accumulates.

    Attributes:
        position: In the training data; `None` outside of the training.
        substitute: The batch that a step reads which is done again; `None` for the batch that
            Lightning has fetched.
        committing: Whether a step is being finished whose averages were complete when its ranks
            changed.
    """

    def __init__(
        self, strategy: ElasticStrategy, recovery: Recovery, calls: HostCalls, resize: Resize
    ) -> None:
        self._strategy = strategy
        self._recovery = recovery
        self._calls = calls
        self._resize = resize
        self.position: TrainingPosition | None = None
        self.substitute: Any = None
        self.committing = False
        # The view in which the last step finished.
        self._generation = recovery.view.generation if recovery.view is not None else -1
        self._begun = False
        self._stepping = False
        self._under_way = StepUnderWay()
        self._changed_in_steps = ChangedInSteps()
        self._restore_progress: Callable[[], None] = lambda: None
        # Under manual optimization: gradients of earlier steps.
        self._own_gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._step: Callable[[Callable[[], Any]], Any] = lambda closure: None
        self._loss: Any = None
        self._output: Any = None

    def place_epoch(self) -> None:
        """Count the batches of an epoch that begins after ranks have changed."""
        assert self.position is not None
        progress = self._strategy.fit_trainer.fit_loop.epoch_loop.batch_progress
        if progress.current.ready == 0 and self._view.generation > 0:
            with self.position.as_planned():
                self.position.begin_epoch()

    def batch(self) -> Any:
        """The batch that a training step reads in place of its own, if any."""
        if not self._stepping:
            self.substitute = None
            self._begin()
        return self.substitute

    def take_batch(self, train: Callable[[Any], Any], batch: Any) -> Any:
        """``train(batch)``, a manual training_step, as one step: repeated as a whole."""

        def step(compute: Callable[[], Any]) -> Any:
            output = compute()
            if not self.committing:
                self.averages_are_complete()
            return output

        return self.take(step, lambda: train(batch if self.substitute is None else self.substitute))

    def take(self, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """``step(closure)``, which averages in ``closure`` and then steps the optimizer, once."""
        recovery, trainer = self._recovery, self._strategy.fit_trainer
        assert self.position is not None
        assert recovery.step is not None
        after = recovery.step + 1
        self._step = step
        self._restore_progress = remember_progress(trainer)
        self.substitute = None
        self._begin()
        self.position.end_step()
        again = self._view.generation != self._generation
        self._stepping = True
        try:
            if again:
                self.take_back()
            while True:
                self._resize.apply(self._strategy, self.position, recovery.step)
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
                        return self._output
                else:
                    recovery.committed()
                    self._finish()
                    self._complete_parameters()
                    return output
        finally:
            self._stepping = self._begun = False
            if again and trainer.accumulate_grad_batches > 1:
                # Lightning does so at multiples of that number of batches
                self._strategy.drop_gradients()

    def averages_are_complete(self) -> None:
        """From here on the step needs no other rank. Collective."""
        self._strategy.survivor.before_commit()
        self._recovery.complete = True
        self._recovery.agree()

    def before_update(self) -> None:
        """Gradients are final: the optimizer will step."""
        self._changed_in_steps.end_step()

    def forget(self) -> None:
        self._under_way.take_back()

    @property
    def _view(self) -> View:
        assert self._recovery.view is not None
        return self._recovery.view

    def _begin(self) -> None:
        if not self._begun:
            assert self.position is not None
            self._begun = True
            self.position.begin_step()
            self._under_way.begin(self._remember())
            if not self._strategy.is_automatic:
                params = self._strategy.fit_model.parameters()
                self._own_gradients = [
                    (param, param.grad.clone()) for param in params if param.grad is not None
                ]

    def _remember(self) -> Callable[[], None]:
        trainer, strategy = self._strategy.fit_trainer, self._strategy
        restore = remember_step(trainer, strategy.fit_model)
        if strategy.is_automatic:
            restore_weights = self._changed_in_steps.begin_step(strategy.fit_model)
        else:
            restore_weights = remember_weights(strategy)

        def restore_step() -> None:
            restore_weights()
            restore()

        return restore_step

    def _accumulate_again(self, closure: Callable[[], Any]) -> None:
        """Repeat the batches of this step with the current ranks; leave the last batch's
        gradients."""
        assert self.position is not None
        self._strategy.drop_gradients()
        for param, gradient in self._own_gradients:
            param.grad = gradient.clone()
        self.substitute = self.position.go_back()
        for _ in range(self.position.num_batches - 1):
            with self._strategy.block_backward_sync():
                closure()
            self.substitute = self.position.fetch()

    def _compute(self, closure: Callable[[], Any]) -> Any:
        self._loss = closure()
        return self._loss

    def _finish(self) -> None:
        self._under_way.finish()
        self._generation, self._begun = self._view.generation, False
        self._resize.finish_step(len(self._view.members))

    def _complete_parameters(self) -> None:
        try:
            with self._calls.inside():
                self._strategy.survivor.after_commit()
        except Exception as error:
            self._stepping = False  # the step is finished
            self._recovery.after(error)  # which completes them in another way

    def commit(self) -> None:
        """Finish the step under way, whose averages are complete. Calls no collective."""
        self.committing = True  # the hooks have run, and gradients are clipped
        try:
            with self._calls.inside(), already_unscaled(self._strategy.precision_plugin):
                self._output = self._step(lambda: self._loss)
        finally:
            self.committing = False
        self._finish()  # in the view whose averages these are
        # another rank may die before this one is connected
        self._restore_progress = lambda: None

    def take_back(self) -> None:
        # else the step itself does its batches again
        if self._stepping:
            self._under_way.take_back()
            self._restore_progress()
            forget_unscaling(self._strategy.precision_plugin)
