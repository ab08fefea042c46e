"""`RingFabricStrategy`: translates Fabric's calls into those of `Replicas`."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from lightning.fabric.accelerators import Accelerator
from lightning.fabric.plugins import CheckpointIO, Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import (
    _BackwardSyncControl,
)
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ring.algorithms import ALGORITHMS
from lightning_ring.algorithms.algorithm import Algorithm
from lightning_ring.algorithms.optional import load_optimizer_state_dict, optimizer_state_dict
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import Compressor
from lightning_ring.integrations.lightning.data import warn_of_padding
from lightning_ring.integrations.lightning.optimization import refuse_scaler
from lightning_ring.integrations.ranks.strategy import OnRingRanks
from lightning_ring.loops.replicas import Replicas
from lightning_ring.loops.timeline import LoopTimeline, open_timeline
from lightning_ring.options import (
    Backend,
    BucketCap,
    RingOptions,
    StartMethod,
    Topology,
    check_choice,
)
from lightning_ring.timeline.settings import timeline_path


class _FabricOptions(RingOptions):
    caller: ClassVar[str] = "RingFabricStrategy"
    names: ClassVar[tuple[str, ...]] = tuple(ALGORITHMS)


class RingFabricStrategy(OnRingRanks, DDPStrategy):  # type: ignore[misc]
    """Synchronous data-parallel training in a loop of Fabric's: ``Fabric(strategy="ring")``,
    ``"ring_sharded"``.

    An algorithm keeps each module's replicas together, from rank 0's values on. ``loss.backward()``
    and ``fabric.backward(loss)`` average gradients. The module's state dict has no prefix.

    A subclass of `DDPStrategy` only because Fabric decides by its class.

    Args:
        broadcast_buffers: After each step rank 0's buffers (BatchNorm statistics) replace those of
            the other ranks.
        backend, bucket_cap_mb, topology, compression, start_method: As of `RingStrategy`.
        algorithm: ``"ring"``, ``"ring_sharded"``, ``"ring_local"`` or an `Algorithm`, which is
            copied for each module.
        timeout, stall_warning, force_communication, timeline: As of `RingStrategy`.
        accelerator, parallel_devices, checkpoint_io, precision: As every strategy of Fabric takes
            them.

    Attributes:
        listeners: Called with a `CollectiveRecord` of each collective of the training, and of
            `all_reduce`.

    Raises:
        ConfigurationError: An argument cannot work; the message says what was expected.
        RankDiscoveryError: The launcher's variables contradict each other.
    """

    def __init__(
        self,
        *,
        backend: Backend = "auto",
        bucket_cap_mb: BucketCap = None,
        topology: Topology = "auto",
        compression: str | Compressor | None = None,
        algorithm: str | Algorithm | None = None,
        broadcast_buffers: bool = True,
        start_method: StartMethod = "popen",
        timeout: timedelta = timedelta(minutes=30),
        stall_warning: timedelta = timedelta(seconds=60),
        force_communication: bool = False,
        timeline: str | Path | None = None,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision: Precision | None = None,
    ) -> None:
        given = locals()
        check_choice("RingFabricStrategy", "broadcast_buffers", broadcast_buffers, (True, False))
        taken = {field.name for field in fields(RingOptions)} & given.keys() - {"broadcast_buffers"}
        super().__init__(
            "Fabric",
            _FabricOptions(**{name: given[name] for name in taken}),
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            checkpoint_io=checkpoint_io,
            precision=precision,
        )
        self._backward_sync_control = BackwardSyncControl()
        self._broadcasts_buffers = broadcast_buffers
        self.timeline: LoopTimeline | None = None
        self._modules: WeakValueDictionary[int, RingModule] = WeakValueDictionary()
        self._num_modules = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> RingFabricStrategy:
        return self  # what ``fabric.setup`` returns holds it

    def _setup_distributed(self) -> None:
        self._set_world_ranks()
        reset_seed()
        comm = self._connect()
        path = timeline_path(self.options.timeline, os.environ)
        about = {"strategy": type(self).__name__}
        self.timeline = open_timeline(path, comm, self.root_device, self.listeners, about)

    def teardown(self) -> None:
        for replicas in self._all_replicas():
            replicas.remove()
        self._modules.clear()
        if self.timeline is not None:
            self.timeline.finish()
        super().teardown()

    def _progress(self) -> str:
        return ", ".join(
            filter(None, (replicas.algorithm.progress() for replicas in self._all_replicas()))
        )

    def _all_replicas(self) -> list[Replicas]:
        return [module.replicas for module in self._modules.values()]

    def show_averages(self) -> None:
        """Before an evaluation under ``"ring_local"``: parameters become the ranks' average.

        Lasts until the next forward of the training. All ranks call it; `Fabric.save` does so too.
        """
        for replicas in self._all_replicas():
            replicas.show_averages()

    def wait_parameters(self) -> None:
        """Return when all parameters are complete, before code reads them under
        ``"ring_sharded"``."""
        for replicas in self._all_replicas():
            replicas.wait_parameters()

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        algorithm = self.options.new_algorithm()
        if (comm := self.communicator) is not None:
            refuse_scaler(self.precision, algorithm)
        called = RingModule(module)
        label = f"module {self._num_modules}: " if self._num_modules else ""
        self._num_modules += 1
        replicas = Replicas(
            module,
            (),
            algorithm,
            comm,
            called=called,
            broadcast_buffers=self._broadcasts_buffers,
            label=label,
            listeners=self.listeners,
            timeline=self.timeline,
            warn=_warn,
        )
        called.replicas = replicas
        weakref.finalize(called, replicas.remove, wait=False).atexit = False
        self._modules[self._num_modules] = called
        if comm is not None:
            rank_zero_info(
                f"lightning_ring: {self.world_size} ranks on {self.ring_environment.num_nodes()} "
                f"node(s), gradients by {type(comm).__name__}{replicas.algorithm.description()}"
            )
        return called

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        for replicas in self._stepped_by(optimizer):
            replicas.add_optimizers([optimizer])
        return optimizer

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        self._stepped_by(optimizer)  # before a loss scaler looks at gradients
        return super().optimizer_step(optimizer, **kwargs)

    def _stepped_by(self, optimizer: Optimizer) -> list[Replicas]:
        """The replicas that ``optimizer`` steps, whose backwards are complete now."""
        stepped = [replicas for replicas in self._all_replicas() if replicas.steps(optimizer)]
        for replicas in stepped:
            replicas.algorithm.backwards.finish()
        return stepped

    def _algorithm_of(self, optimizer: Any) -> Algorithm:
        found = self._stepped_by(optimizer)
        return found[0].algorithm if found else Algorithm()

    def process_dataloader(self, dataloader: Any) -> Any:
        warn_of_padding(dataloader, self.world_size)
        return dataloader

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        algorithm = self._algorithm_of(optimizer)
        if not algorithm.sharded:
            return super().clip_gradients_norm(
                module, optimizer, max_norm, norm_type, error_if_nonfinite
            )
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        if (
            error_if_nonfinite
            and not algorithm.clip_grad_norm_(parameters, float("inf"), norm_type).isfinite()
        ):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is "
                "non-finite, so it cannot be clipped. To disable this error and scale the "
                "gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
            )
        return algorithm.clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float | int
    ) -> None:
        if why := self._algorithm_of(optimizer).refuses_clipping:
            raise ConfigurationError(f"gradients were about to be clipped by value, but {why}")
        super().clip_gradients_value(module, optimizer, clip_val)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self._reduce(tensor, group, reduce_op)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return super().get_module_state_dict(_complete(module))

    def load_module_state_dict(
        self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True
    ) -> None:
        # values that arrive later would overwrite the loaded ones
        super().load_module_state_dict(_complete(module), state_dict, strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The full state dict; if sharded, empty except on rank 0. Collective."""
        algorithm = self._algorithm_of(optimizer)
        if not algorithm.sharded:
            return super().get_optimizer_state(optimizer)
        return optimizer_state_dict(algorithm, optimizer, is_rank_zero=self.is_global_zero)

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **options: Any) -> None:
        kept = {}
        for name, replicas in _replicas_in(state):
            replicas.show_averages()
            kept[name] = replicas.algorithm.state_dict()
        if any(kept.values()) and self.communicator is not None:
            state = state | {ALGORITHM_KEY: kept}
        super().save_checkpoint(path, state, *args, **options)

    def load_checkpoint(  # type: ignore[override]
        self, path: Any, state: Any = None, strict: bool = True, **options: Any
    ) -> dict[str, Any]:
        if isinstance(state, Optimizer):
            self._loads(state).load_state_dict(self.checkpoint_io.load_checkpoint(path, **options))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, **options)
        filled = {
            name: self._loads(one) if isinstance(one, Optimizer) else one
            for name, one in state.items()
        }
        remainder = super().load_checkpoint(path, filled, strict, **options)
        state.update((name, one) for name, one in filled.items() if type(one) is not _LoadsState)
        kept = remainder.pop(ALGORITHM_KEY, {})
        for name, replicas in _replicas_in(state) if self.communicator is not None else ():
            if problem := replicas.algorithm.load_state_dict(kept.get(name, {})):
                _warn(problem)
        return remainder

    def _loads(self, optimizer: Optimizer) -> _LoadsState:
        return _LoadsState(
            partial(load_optimizer_state_dict, self._algorithm_of(optimizer), optimizer)
        )


@dataclass
class _LoadsState:
    load_state_dict: Callable[[dict[str, Any]], None]
    state_dict: Callable[[], dict[str, Any]] = dict


def _replicas_in(state: dict[str, Any]) -> Iterator[tuple[str, Replicas]]:
    return ((name, one.replicas) for name, one in state.items() if isinstance(one, RingModule))


def _complete(module: nn.Module) -> nn.Module:
    if not isinstance(module, RingModule):
        return module
    module.replicas.wait_parameters()
    return module.module


def _warn(message: str) -> None:
    rank_zero_warn(f"lightning_ring: {message}")


class RingModule(nn.Module):
    """``module`` as Fabric calls it: forward methods run through it, in the training's
    precision."""

    replicas: Replicas

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return copy.deepcopy(self.module, memo)  # a copy trains alone


class BackwardSyncControl(_BackwardSyncControl):
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        assert isinstance(module, RingModule)  # `Fabric.no_backward_sync` has asked
        return module.replicas.no_sync() if enabled else nullcontext()


# states of the algorithms (residuals), by the name of the module
ALGORITHM_KEY = "lightning_ring_algorithm"
