"""`State` and its kinds: what a training goes back to, or gets from another rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lightning_ring.errors import HorovodInternalError, HostsUpdatedInterrupt
from lightning_ring.horovod.context import newcomers_wait, rank
from lightning_ring.horovod.elastic.sampler import ElasticSampler
from lightning_ring.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class State:
    """Derive from it and write `save`, `restore` and `sync`, and `reset` if needed.

    Args:
        bcast_object: Sends rank 0's object to all ranks, as `broadcast_object`.
        get_rank: Gives this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._hosts_updated = False
        self._reset_callbacks: list[Callable[[], Any]] = []

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], Any]]) -> None:
        """Call each of ``callbacks`` when the ranks have changed, before `sync`."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        self._hosts_updated = False
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Have the next check of rank 0 raise `HostsUpdatedInterrupt` on all ranks."""
        self._hosts_updated = True

    def commit(self) -> None:
        """`save`, then `check_host_updates`. Collective."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Let waiting ranks take part. Collective.

        Raises:
            HostsUpdatedInterrupt: On all ranks; `run` handles it.
        """
        waits = newcomers_wait()
        if waits is None and not self._hosts_updated:
            return  # nobody ever comes
        if self._bcast_object(bool(waits) or self._hosts_updated):
            self._hosts_updated = False
            with contextlib.suppress(HorovodInternalError):
                self._bcast_object(None)  # all ranks know: whoever goes on first stops the others
            raise HostsUpdatedInterrupt()

    def save(self) -> None:
        """Keep the state as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what `save` has kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take over rank 0's state. Collective."""
        raise NotImplementedError

    def reset(self) -> None:
        """Make anew what depends on the ranks."""


class ObjectState(State):
    """Picklable objects as attributes, by name."""

    def __init__(
        self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any
    ) -> None:
        self._saved_state = kwargs
        self._set_attributes()
        super().__init__(bcast_object=bcast_object, get_rank=get_rank)

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attributes()

    def sync(self) -> None:
        if self._saved_state:
            self._saved_state = self._bcast_object(
                {name: getattr(self, name) for name in self._saved_state}
            )
            self._set_attributes()

    def _set_attributes(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """Modules, optimizers, `ElasticSampler`s (by their state dicts), and picklable objects."""

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        given = {**kwargs, "model": model, "optimizer": optimizer}
        handlers = {
            name: handler
            for name, value in given.items()
            if (handler := _handler(value)) is not None
        }
        self._handlers: dict[str, StateHandler] = handlers
        for name, handler in handlers.items():
            setattr(self, name, handler.value)
        rest = {name: value for name, value in given.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **rest)

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self.__dict__.get("_handlers", {}).get(name)
        if handler is not None and handler.value is not value:
            handler.set_value(value)
        super().__setattr__(name, value)


class StateHandler:
    """Saves, restores and synchronises one ``value`` that has a state dict."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        # optimizers keep the tensors that they are given
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        self.value = value
        self.save()


class ModelStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
    def sync(self) -> None:
        states = allgather_object(self.value.state_dict())
        processed = set().union(*(state.get("processed_indices", ()) for state in states))
        self.value.load_state_dict({**states[0], "processed_indices": processed})
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Have `TorchState` choose handlers from ``registry``: pairs of type and handler; the first
    match counts."""
    global _registry
    _registry = registry


def _handler(value: Any) -> StateHandler | None:
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)
