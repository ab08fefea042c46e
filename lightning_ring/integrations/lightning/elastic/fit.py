"""An elastic fit: what `Recovery` calls in a Trainer's training."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lightning_ring.comm.communicator import Communicator
from lightning_ring.elastic.ending import end_job_on_error
from lightning_ring.elastic.generations import Generations
from lightning_ring.elastic.recovery import Recovery
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.heir import take_over
from lightning_ring.integrations.lightning.elastic.host_calls import HostCalls
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from lightning_ring.integrations.lightning.elastic.step_undo import remember_step
from lightning_ring.job.job import adopt
from lightning_ring.membership.member import Member
from lightning_ring.membership.view import View

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

_opened: Member | None = None


def member_of_this_process() -> Member:
    """This process's place in the job, taken once. An uncaught exception ends the job from here on."""
    global _opened
    if _opened is None:
        _opened = Member()
        _opened.open()
        end_job_on_error(_opened)
        atexit.register(_opened.finish)
    return _opened


class ElasticFit:
    """The part of an `ElasticStrategy` that brings its fit from one view to the next.

    Attributes:
        substitute: The batch that a step reads which is done again; `None` for the batch that Lightning has fetched.
        changed: Whether ranks have changed since the loader was told.
    """

    def __init__(self, strategy: ElasticStrategy) -> None:
        options = strategy.options
        self._strategy = strategy
        member = member_of_this_process()
        device = strategy.root_device
        self._generations = Generations(member, options.backend, device, options.timeout, options.stall_warning)
        self.recovery = Recovery(member, self._generations, self)
        self.calls = HostCalls(self.recovery.after)
        self.position: TrainingPosition | None = None
        self.substitute: Any = None
        self.changed = False
        self._undo: Callable[[], None] | None = None
        self._step: Callable[[Callable[[], Any]], Any] = lambda closure: None
        self._loss: Any = None
        self._output: Any = None

    def take_step(self, step: Callable[[Callable[[], Any]], Any], closure: Callable[[], Any]) -> Any:
        """``step(closure)``, which computes averages in ``closure`` and then steps the optimizer, once."""
        trainer, model, recovery = self._strategy._trainer, self._strategy.model, self.recovery
        assert trainer is not None
        assert model is not None
        assert self.position is not None
        assert recovery.step is not None
        self._step, self.substitute = step, None
        after = recovery.step + 1
        if self.changed:
            self.changed, self.substitute = False, self.position.read_again()
        while True:
            self.position.begin_step()
            self._undo = remember_step(trainer, model)
            try:
                with self.calls.inside():
                    output = step(lambda: self._compute(closure))
            except Exception as error:
                recovery.after(error)
                self.changed = False
                self.substitute = self.position.go_on(after_step=recovery.step == after)
                if recovery.step == after:
                    return self._output
                continue
            self._undo = None
            recovery.committed()
            return output

    def _compute(self, closure: Callable[[], Any]) -> Any:
        self._loss = closure()
        self.recovery.complete = True
        self.recovery.agree()
        return self._loss

    # -- called by the recovery

    def commit(self) -> None:
        with self.calls.inside():
            self._output = self._step(lambda: self._loss)
        self._undo = None

    def take_back(self) -> None:
        if self._undo is not None:
            self._undo()
            self._undo = None

    def enter(self, view: View, comm: Communicator) -> None:
        if view.newcomers:
            raise ConfigurationError(
                "A new process came to a fit, which cannot let it in yet. Start the job without respawns."
            )
        strategy = self._strategy
        was_rank_zero = self.recovery.step is None or strategy.is_global_zero
        assert self._generations.job is not None
        adopt(self._generations.job)
        strategy._job = self._generations.job
        strategy.parallel_devices = [torch.device("cpu")] * len(view.members)
        strategy.set_world_ranks()
        if strategy._step_hooks is not None:
            strategy.attach_anew(comm)
        self.calls.compare(comm)
        trainer = strategy._trainer
        if trainer is None or view.generation == 0:
            return
        self.changed = True
        trainer.fit_loop.epoch_loop.val_loop._combined_loader = None  # its sampler has the ranks before
        if strategy.is_global_zero and not was_rank_zero:
            take_over(trainer.loggers)
