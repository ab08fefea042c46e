"""The state of a fit, from rank 0 to processes that join it between two steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_ring.algorithms.optional import load_optimizer_state_dict, optimizer_state_dict
from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.differences import broadcast_differing
from lightning_ring.comm.replicate import (
    broadcast_groups,
    broadcast_optimizer_state,
    broadcast_tensors,
    check_same_model,
    check_same_optimizer,
)
from lightning_ring.errors import ConfigurationError
from lightning_ring.integrations.lightning.elastic.attributes import (
    changed_on_all,
    take_attributes,
    user_callbacks,
)
from lightning_ring.integrations.lightning.elastic.rank_zero_files import names_of, take_names
from lightning_ring.integrations.lightning.elastic.resize import stay_at_the_end
from lightning_ring.integrations.lightning.elastic.watchers import (
    log_as_the_others,
    log_every_n_steps,
)

if TYPE_CHECKING:
    from lightning_ring.integrations.lightning.elastic.fit import ElasticFit
    from lightning_ring.integrations.lightning.elastic.strategy import ElasticStrategy

_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def hand_over_fit(
    strategy: ElasticStrategy, fit: ElasticFit, comm: Communicator, *, receives: bool
) -> None:
    """Give ranks that ``receive`` all that a checkpoint of rank 0 would hold, and where it writes.
    Collective.

    The other ranks stay as they are. Where processes have caught up, parameters and optimizer state
    are sent that differ. Sharded state comes from the rank that steps it. What a module keeps
    outside parameters, buffers and `on_save_checkpoint` is not sent.

    `check_newcomers` comes first.
    """
    trainer, model = strategy.fit_trainer, strategy.fit_model
    compares = any(comm.all_gather_object(receives and fit.catching_up.has_state))
    changed = changed_on_all(fit.first_attributes, trainer, comm, receives=receives)
    sent = None if receives else _state(trainer, strategy, fit) | {"attributes": changed}
    state = comm.broadcast_object(sent if comm.rank == 0 else None)
    assert state is not None
    buffers = list(model.buffers())
    # ranks may have buffers of their own, such as statistics of BatchNorm
    broadcast_tensors(buffers if receives else [buffer.clone() for buffer in buffers], comm)
    send = _Sending(comm, by_digest=compares, receives=receives)
    counted = strategy.survivor.let_in(fit.catching_up.parts, receives=receives, compares=compares)
    send(
        [
            param.detach()
            for param in model.parameters()
            if counted is None or not param.requires_grad
        ]
    )
    for optimizer in strategy.optimizers:
        if counted is not None:
            broadcast_groups(optimizer, comm)
        elif strategy.algorithm.sharded:
            whole = optimizer_state_dict(strategy.algorithm, optimizer, is_rank_zero=comm.rank == 0)
            whole = comm.broadcast_object(whole)
            if receives:
                load_optimizer_state_dict(strategy.algorithm, optimizer, whole)
        else:
            broadcast_optimizer_state(optimizer, comm, send=send)
    if comm.rank == 0 and (counted is not None or not strategy.algorithm.sharded):
        send.tell(*(counted or (0, 0)))
    if receives:
        _restore(trainer, strategy, fit, state)
    strategy.timeline.let_in(comm, joins=receives)


def check_newcomers(
    strategy: ElasticStrategy, fit: ElasticFit, comm: Communicator, *, joins: bool
) -> None:
    """Compare all that newcomers have to have in common with the others, and do not get from them.
    Collective.

    Raises:
        ModelMismatchError: The ranks' models or optimizers differ.
        ConfigurationError: The fit is not the script's first one, or batches, limits or callbacks
            differ.
    """
    trainer, position = strategy.fit_trainer, fit.step.position
    assert position is not None
    callbacks = [type(callback).__name__ for callback in user_callbacks(trainer)]
    limits = {
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "order": position.order,
    }
    own = (
        fit.process.member.number,
        joins,
        fit.process.num_fits,
        position.batch_size,
        limits,
        callbacks,
    )
    numbers, new, num_fits, batch_sizes, all_limits, all_callbacks = zip(
        *comm.all_gather_object(own), strict=True
    )
    if max(num_fits) != 1:
        raise ConfigurationError(
            f"A process came to a job that is in fit number {max(num_fits)} of its script, and "
            "cannot do the earlier ones again. Use one fit in an elastic script."
        )
    check_batches(dict(zip(numbers, batch_sizes, strict=True)))
    old_callbacks = [names for names, is_new in zip(all_callbacks, new, strict=True) if not is_new]
    for number, limit, names in zip(numbers, all_limits, all_callbacks, strict=True):
        if limit != all_limits[0]:
            raise ConfigurationError(
                f"Process {number} would train on other data, or to another end, than process "
                f"{numbers[0]}: {limit} and {all_limits[0]}. Keep the data set as it is while the "
                "job runs, and change no limit."
            )
        if names not in old_callbacks:
            raise ConfigurationError(
                f"Process {number} has other callbacks than the ranks that train: {names} and "
                f"{old_callbacks[0]}. Give the Trainer of each process the same ones, and add none "
                "while it trains."
            )
    check_same_model(strategy.fit_model, comm)
    for optimizer in strategy.optimizers:
        check_same_optimizer(optimizer, comm)


def check_batches(sizes: Mapping[int, int]) -> None:
    """Raise a ConfigurationError unless all processes, by number, have batches of one size: a
    step counts on it.
    """
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"process {number} has {size}" for number, size in sorted(sizes.items()))
        raise ConfigurationError(
            "A process joins whose training batches have another size than those of the others "
            f"({shown}). Each rank keeps its batch size, however many there are. Give DataLoader a "
            "number, or compute it from trainer.world_size, which in the set-up of every process "
            "is the number with which the job began."
        )


class _Sending:
    """Sends rank 0's tensors to those that receive, ``by_digest`` only what differs, and counts
    them.
    """

    def __init__(self, comm: Communicator, *, by_digest: bool, receives: bool) -> None:
        self._comm, self._by_digest, self._receives = comm, by_digest, receives
        self._sent = self._of = 0  # bytes

    def __call__(self, tensors: list[Tensor], new: Sequence[int] = ()) -> None:
        size = sum(tensor.nbytes for tensor in tensors)
        self._of += size
        if self._by_digest:
            self._sent += broadcast_differing(tensors, self._comm, compares=self._receives, new=new)
        else:
            broadcast_tensors(tensors, self._comm)
            self._sent += size

    def tell(self, further_sent: int, further_of: int) -> None:
        sent, of = (self._sent + further_sent) / 2**20, (self._of + further_of) / 2**20
        rank_zero_info(
            f"lightning_ring: while the ranks waited, {sent:.1f} of {of:.1f} MiB of parameters and "
            "optimizer state were sent to new ones."
        )


def _state(trainer: pl.Trainer, strategy: ElasticStrategy, fit: ElasticFit) -> dict[str, Any]:
    with strategy.without_optimizer_states():
        # on all ranks: it calls hooks
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
    del checkpoint["optimizer_states"]
    return {
        "step": fit.recovery.step,
        "checkpoint": _without_own_tensors(checkpoint, strategy.fit_model),
        "position": fit.step.position.state_dict() if fit.step.position is not None else None,
        "logger_names": names_of(trainer.loggers),
        "folders": [callback.dirpath for callback in _model_checkpoints(trainer)],
        "logged": {name: dict(getattr(trainer._logger_connector, name)) for name in _LOGGED},
        "should_stop": trainer.should_stop,
        "buffers": strategy.buffers_state,
        "rank_changes": strategy.rank_changes.state_dict(),
        "log_every_n_steps": log_every_n_steps(trainer),
    }


def _restore(
    trainer: pl.Trainer, strategy: ElasticStrategy, fit: ElasticFit, state: dict[str, Any]
) -> None:
    for callback, folder in zip(_model_checkpoints(trainer), state["folders"], strict=True):
        callback.dirpath = folder
    take_names(trainer.loggers, state["logger_names"])
    own = _tensors_of(strategy.fit_model)
    connector = trainer._checkpoint_connector
    checkpoint = tree_map_only(_Own, lambda one: own[one.name], state["checkpoint"])
    connector._loaded_checkpoint = checkpoint
    connector.restore_datamodule()
    call._call_lightning_module_hook(trainer, "on_load_checkpoint", checkpoint)
    extra = {name: value for name, value in checkpoint["state_dict"].items() if name not in own}
    with torch.no_grad():
        strategy.fit_model.load_state_dict(extra, strict=False)  # what get_extra_state returned
    connector.restore_callbacks()
    connector.restore_precision_plugin_state()
    connector.restore_loops()
    connector.restore_lr_schedulers()
    connector._loaded_checkpoint = {}
    _go_on_without_restart(trainer.fit_loop)
    for name, metrics in state["logged"].items():
        getattr(trainer._logger_connector, name).update(metrics)
    trainer.should_stop = state["should_stop"]
    strategy.buffers_state = state["buffers"]
    strategy.rank_changes.load_state_dict(state["rank_changes"])
    log_as_the_others(trainer, state["log_every_n_steps"])
    take_attributes(trainer, state["attributes"])
    assert fit.step.position is not None
    fit.step.position.load_state_dict(state["position"])
    assert fit.recovery.view is not None
    fit.resize.begin(strategy.world_size, fit.recovery.view.generation)
    stay_at_the_end([config.scheduler for config in strategy.lr_scheduler_configs])


@dataclass(frozen=True, slots=True)
class _Own:
    """In the place of a parameter or buffer of the model in a checkpoint: the ranks have got it
    already.
    """

    name: str


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def _without_own_tensors(checkpoint: dict[str, Any], model: nn.Module) -> Any:
    """Callbacks may have put others in the place of the model's tensors, under their names, and
    these elsewhere.
    """
    names = {_place(tensor): name for name, tensor in _tensors_of(model).items() if tensor.numel()}

    def name_of(tensor: Tensor) -> Any:
        name = names.get(_place(tensor))
        return _Own(name) if name is not None else tensor

    return tree_map_only(Tensor, name_of, checkpoint)


def _place(tensor: Tensor) -> Any:
    return (
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.data_ptr() if tensor.layout == torch.strided else -1,
    )


def _go_on_without_restart(loop: _Loop) -> None:
    """The loops are where the others' are, not at the beginning of a resumed run."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if isinstance(inner, _Loop):
            _go_on_without_restart(inner)


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
