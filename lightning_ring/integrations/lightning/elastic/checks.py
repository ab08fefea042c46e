"""What an elastic fit refuses by name, before it begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch.optim import LBFGS

from lightning_ring.algorithms.optional import refusal_of_deaths
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.replicate import (
    FROZEN,
    check_same_description,
    check_same_optimizer,
    described,
)
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.checkpoints import user_callbacks
from lightning_ring.monitor.profile import RingProfile
from lightning_ring.options import check_choice, check_duration

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

_REFUSED = (
    RingProfile,  # it communicates by itself
    # they train before the fit: a new process would do so alone
    *(LearningRateFinder, BatchSizeFinder),
)
_REFUSED_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "backend": ("mpi",),
    "uneven": ("join",),
    "start_method": ("spawn", "fork"),
    "force_communication": (True,),
}


def check_arguments(strategy: ElasticStrategy) -> None:
    """Refuse arguments that cannot work."""
    name, options = type(strategy).__name__, strategy.options
    if type(strategy.min_ranks) is not int or strategy.min_ranks < 1:
        raise ConfigurationError(
            f"{name} got min_ranks={strategy.min_ranks!r}, expected a number from 1 on."
        )
    if not callable(strategy.resize_lr):
        rules, other = ("keep", "linear", "sqrt"), "or a function of two numbers of ranks"
        check_choice(name, "resize_lr", strategy.resize_lr, rules, other)
    check_duration(name, "wait_for_ranks", strategy.wait_for_ranks)
    if refusal := refusal_of_deaths(options.new_algorithm()):
        raise ConfigurationError(
            f"{name} was built, but its algorithm cannot go on without one of its ranks: "
            f"{refusal}. Use no algorithm, or Sharded(), with compression None, 'fp16' or 'bf16'."
        )
    given = [(argument, getattr(options, argument)) for argument in _REFUSED_ARGUMENTS]
    found = [f"{key}={value!r}" for key, value in given if value in _REFUSED_ARGUMENTS[key]]
    if found:
        raise ConfigurationError(
            f"{name} got {', '.join(found)}, which does not work with ranks that come and go yet. "
            "Leave it out, or use RingStrategy."
        )


def check_fit(trainer: pl.Trainer) -> None:
    """Raise a ConfigurationError that names everything an elastic fit cannot do yet."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = [type(callback).__name__ for callback in callbacks if isinstance(callback, _REFUSED)]
    found += [name for name, is_there in _REASONS.items() if is_there(trainer)]
    if found:
        raise ConfigurationError(
            f"An elastic fit (strategy='ring_elastic') does not work with {', '.join(found)} yet. "
            "Leave it out, or use strategy='ring', whose job ends when a rank dies."
        )


def keeps_newcomers_out(trainer: pl.Trainer, num_fits: int) -> str:
    """Why processes cannot join this fit, number ``num_fits`` of its script; ``""`` if they can."""
    if num_fits > 1:
        return (
            f"this is fit number {num_fits} of the script, and it would have to do the earlier "
            "ones again. It ends with the job. Give each fit a script of its own where dead ranks "
            "are to be replaced in it."
        )
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(callback, StochasticWeightAveraging) for callback in callbacks):
        return (
            "StochasticWeightAveraging begins at the start of an epoch, with a schedule and a "
            "count of its own, which the process would not get. It ends with the job. Use "
            "WeightAveraging or EMAWeightAveraging where dead ranks are to be replaced."
        )
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        return (
            "ModelPruning replaces parameters by pairs of weights and masks, and checkpoints hold "
            "the weights only. It ends with the job. Prune after the training, or in a job whose "
            "dead ranks are not to be replaced."
        )
    return ""


def check_newcomers(
    strategy: ElasticStrategy, fit: ElasticFit, comm: Communicator, *, joins: bool
) -> None:
    """Compare what newcomers do not get from the others. Collective.

    Raises:
        ModelMismatchError: The ranks' models or optimizers differ.
        ConfigurationError: Limits, data or callbacks differ.
    """
    trainer, position = strategy.fit_trainer, fit.step.position
    assert position is not None
    limits = {
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "order": position.order,
    }
    callbacks = [type(callback).__name__ for callback in user_callbacks(trainer)]
    own = fit.process.member.number, joins, limits, callbacks
    gathered = comm.all_gather_object(own, name="what newcomers have")
    first, _, first_limits, _ = gathered[0]
    old_callbacks = [names for _, is_new, _, names in gathered if not is_new]
    for number, _, limit, names in gathered:
        if limit != first_limits:
            raise ConfigurationError(
                f"Process {number} would train on other data, or to another end, than process "
                f"{first}: {limit} and {first_limits}. Keep the data set as it is while the job "
                "runs, and change no limit."
            )
        if names not in old_callbacks:
            raise ConfigurationError(
                f"Process {number} has other callbacks than the ranks that train: {names} and "
                f"{old_callbacks[0]}. Give the Trainer of each process the same ones, and add none "
                "while it trains."
            )
    module = strategy.fit_model
    described_tensors = {
        **described("parameter", module.named_parameters()),
        **described("buffer", module.named_buffers()),
    }
    # the checkpoint has what finetuning has frozen and added
    unfrozen = {name: text.removesuffix(FROZEN) for name, text in described_tensors.items()}
    check_same_description(unfrozen, comm)
    if not any(isinstance(callback, BaseFinetuning) for callback in user_callbacks(trainer)):
        for optimizer in strategy.optimizers:
            check_same_optimizer(optimizer, comm)


def check_batches(sizes: Sequence[int]) -> None:
    """Refuse different batch sizes."""
    if len(set(sizes)) > 1:
        raise ConfigurationError(
            f"The ranks of an elastic fit have training batches of different sizes: {[*sizes]}, by "
            "rank. Give DataLoader a number, or compute it from trainer.world_size."
        )


def _has_scaler(trainer: Any) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None


_REASONS: dict[str, Callable[[Any], bool]] = {
    "manual optimization and a sharded algorithm together": lambda trainer: (
        not trainer.lightning_module.automatic_optimization and trainer.strategy.algorithm.sharded
    ),
    "manual optimization and a gradient scaler (precision='16-mixed') together": lambda trainer: (
        not trainer.lightning_module.automatic_optimization and _has_scaler(trainer)
    ),
    "torch.optim.LBFGS": lambda trainer: any(
        isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers
    ),
    "a gradient scaler (precision='16-mixed') and a sharded algorithm together": lambda trainer: (
        _has_scaler(trainer) and trainer.strategy.algorithm.sharded
    ),
    "reload_dataloaders_every_n_epochs": lambda trainer: bool(
        trainer.reload_dataloaders_every_n_epochs
    ),
    "overfit_batches": lambda trainer: trainer.overfit_batches > 0,
    "training_step(dataloader_iter)": lambda trainer: (
        "dataloader_iter" in type(trainer.lightning_module).training_step.__code__.co_varnames
    ),
}
