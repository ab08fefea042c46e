"""`ElasticStrategy`: a `RingStrategy` whose fit goes on when ranks die."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.seed import reset_seed
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
from lightning_ring.integrations.lightning.elastic.heir import names_of, take_names
from lightning_ring.integrations.lightning.elastic.metric_sync import gathering_through
from lightning_ring.integrations.lightning.elastic.position import TrainingPosition
from lightning_ring.integrations.lightning.elastic.step_undo import remember_callbacks, remember_metrics
from lightning_ring.integrations.lightning.strategy import RingStrategy, _inform, _warn
from lightning_ring.membership.member import Member
from lightning_ring.monitor.terminal import widen_terminal

T = TypeVar("T")


class ElasticStrategy(RingStrategy):
    """Ranks that a steward started (`launch.elastic.ElasticJob`) train on when one of them dies. CPUs of one host.

    A death is survived from the first training step to the end of the fit: in a step, in collectives that Lightning
    calls between steps, in validation and in saving. In set-up, test and predict, and in collectives that code calls by
    itself between steps, it ends the job, as with `RingStrategy`.

    Raises:
        ConfigurationError: The fit needs something that a death would destroy, or that is not written yet.
    """

    strategy_name = "ring_elastic"

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**({"monitor": False} | arguments))
        self._fit: ElasticFit | None = None
        self._in_fit = ExitStack()  # what the fit has changed in Trainer and module
        if refusal := self.options.new_algorithm().refusal_of_deaths():
            raise ConfigurationError(f"An elastic fit cannot go on without one of its ranks: {refusal}.")
        refused = {"uneven": "error", "timeline": None, "monitor": False, "topology": "auto"}
        if also := [name for name, value in refused.items() if getattr(self.options, name) != value]:
            raise ConfigurationError(f"An elastic fit does not work with {', '.join(also)} yet. Leave it out.")

    def setup_distributed(self) -> None:
        if not Member.is_wanted():
            raise ConfigurationError(
                "No steward started this process, which would have to outlive it: an elastic fit runs in the ranks of "
                "`lightning_ring.launch.elastic.ElasticJob`."
            )
        reset_seed()
        widen_terminal()
        if self._fit is None:
            self._fit = ElasticFit(self)
            self._fit.recovery.start()
        self._process_group_backend = torch.distributed.get_backend()

    def attach_anew(self, comm: Communicator) -> None:
        """Average gradients over ``comm`` from now on. Collective."""
        assert self.model is not None
        self.algorithm.detach(wait=False)
        for param in self.model.parameters():
            param.grad = None  # part of a step that is done again; and its memory is used again
        self._recorded = RecordedCommunicator(comm, self.listeners)
        self.algorithm.attach(self.model, self.optimizers, self._recorded, _warn, _inform)

    # -- training

    def on_train_start(self) -> None:
        super().on_train_start()
        trainer, fit = self._trainer, self._fit
        assert trainer is not None
        if fit is None or self._step_hooks is None:
            return
        self._check(trainer)
        fit.position = TrainingPosition(trainer)
        plain = super().broadcast  # rank 0 is asked when it is called: it may be another one the second time
        names = self._call(lambda: plain(names_of(trainer.loggers) if self.is_global_zero else [], 0))
        take_names(trainer.loggers, names)
        self._in_fit.enter_context(gathering_through(fit.calls, trainer.lightning_module))
        loop = trainer.fit_loop.epoch_loop
        advance, validate = loop.advance, loop.val_loop.run
        self._in_fit.callback(vars(loop).pop, "advance", None)
        self._in_fit.callback(vars(loop.val_loop).pop, "run", None)

        def advance_where_it_stands(data_fetcher: Any) -> None:
            self._tell_loader(fit, fit.position)
            advance(data_fetcher)

        loop.advance = advance_where_it_stands  # type: ignore[method-assign]
        loop.val_loop.run = lambda: self._validate(validate)  # type: ignore[method-assign]

    def teardown(self) -> None:
        self._in_fit.close()
        super().teardown()

    def _tell_loader(self, fit: ElasticFit, position: TrainingPosition | None) -> None:
        """Before a batch is fetched: the number of ranks may have changed outside a step, or in an earlier epoch."""
        assert position is not None
        trainer = self._trainer
        assert trainer is not None
        first = trainer.fit_loop.epoch_loop.batch_progress.current.ready == 0
        if first and fit.recovery.view is not None and fit.recovery.view.generation > 0:
            position.begin_epoch()
        elif fit.changed:
            position.go_on(after_step=True)
        fit.changed = False

    def _check(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        reasons = {
            "manual optimization": not module.automatic_optimization,
            "several optimizers": len(self.optimizers) != 1,
            "accumulate_grad_batches": trainer.accumulate_grad_batches != 1,
            "reload_dataloaders_every_n_epochs": bool(getattr(trainer, "reload_dataloaders_every_n_epochs", 0)),
            "GPUs": self.root_device.type != "cpu",
        }
        if found := [name for name, is_there in reasons.items() if is_there]:
            raise ConfigurationError(f"An elastic fit does not work with {', '.join(found)} yet. Use strategy='ring'.")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._call(lambda: super(ElasticStrategy, self).on_train_batch_start(batch, batch_idx))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._fit is not None and self._fit.substitute is not None:
            args = (self._fit.substitute, *args[1:])
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        plain = super().optimizer_step
        if self._fit is None or self._step_hooks is None:
            return plain(optimizer, closure, model, **kwargs)
        return self._fit.take_step(lambda compute: plain(optimizer, compute, model, **kwargs), closure)

    # -- collectives of Lightning between steps

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._call(lambda: super(ElasticStrategy, self).barrier(*args, **kwargs))

    def broadcast(self, obj: T, src: int = 0) -> T:
        return self._call(lambda: super(ElasticStrategy, self).broadcast(obj, src))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        kept = tensor.detach().clone() if self._is_survivable else None

        def run() -> Any:
            if kept is not None and not tensor.requires_grad:
                tensor.copy_(kept)  # an earlier attempt may have changed it in place
            return super(ElasticStrategy, self).reduce(tensor, group, reduce_op)

        return self._call(run)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save = super().save_checkpoint
        self._call(lambda: self._and_barrier(lambda: save(dict(checkpoint), filepath, storage_options)))

    @property
    def _is_survivable(self) -> bool:
        return self._fit is not None and self._fit.position is not None and not self._alone

    def _call(self, run: Callable[[], T]) -> T:
        return self._fit.calls.call(run) if self._fit is not None and self._is_survivable else run()

    def _and_barrier(self, run: Callable[[], T]) -> T:
        """Nobody leaves before all have run it to the end."""
        result = run()
        if self._comm is not None and not self._alone:
            self._comm.barrier()
        return result

    def _validate(self, run: Callable[[], Any]) -> Any:
        """A validation, again from its start where a rank dies in it."""
        trainer, module = self._trainer, self.lightning_module
        if self._fit is None or not self._is_survivable or trainer is None or module is None:
            return run()
        loop = trainer.fit_loop.epoch_loop.val_loop
        restore_metrics, restore_callbacks = remember_metrics(module), remember_callbacks(trainer)
        modes = [(part, part.training) for part in module.modules()]

        def take_back() -> None:
            restore_metrics()
            restore_callbacks()
            for part, training in modes:  # else the second run finds it in eval mode, and leaves it there
                part.training = training
            loop._restarting, loop._combined_loader = False, None
            trainer.validating = True

        return self._fit.calls.call(lambda: self._and_barrier(run), take_back)
