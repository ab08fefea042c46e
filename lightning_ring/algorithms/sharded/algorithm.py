"""`Sharded`: the algorithm behind ``strategy="ring_sharded"``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Tell, log
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded import norms
from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.algorithms.sharded.memory import check_no_aliases
from lightning_ring.algorithms.sharded.mirrors import Mirrors
from lightning_ring.algorithms.sharded.optimizer import SlicedOptimizer
from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.algorithms.sharded.reads import ParameterReads
from lightning_ring.algorithms.sharded.rebuilding import Rebuilding, Standing
from lightning_ring.algorithms.sharded.state import State, renamed
from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import ConfigurationError
from lightning_ring.gradients.compression import Compressor

_ENDING_SECONDS = 1.0  # in which what all ranks have sent arrives


class Sharded(Averaging):
    """Gradients are reduce-scattered, each rank steps its shard, and parameters are all-gathered.

    A step starts an all-gather of each changed bucket. If ``overlaps`` is True the step returns at
    once, and a module that is called waits for the buckets of its parameters (`ParameterReads`).
    Else the step waits.

    Args:
        bucket_cap_mb: As of `Averaging`.
        compression: As of `Averaging`; parameters always travel in their own dtype.

    With ``mirrors_shards`` each rank also steps the shard of another rank, and a step leaves
    parameters incomplete until `after_commit`: ranks may then die at any moment.
    """

    sharded: ClassVar[bool] = True
    overlaps: bool = False

    def __init__(
        self,
        *,
        bucket_cap_mb: float | None = None,
        compression: str | Compressor | None = None,
    ) -> None:
        super().__init__(
            bucket_cap_mb=bucket_cap_mb,
            compression=compression,
            shards=True,
            on_new_parameters=self._follow_module,
        )
        self._mirrors: Mirrors | None = None
        # whole states of the optimizers, between `move` and `attach`
        self._moved: list[State] | None = None
        self._is_cut = False  # this rank has only parts of the optimizers' state
        self._changed: list[Parameter] = []  # by a step whose parameters are not gathered yet
        self._parameters: ShardedParameters | None = None
        # others live as long as their optimizers, through the hooks
        self._set: list[SlicedOptimizer] = []
        self._sliced: MutableMapping[int, SlicedOptimizer] = {}  # weak, from `attach` on

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Tell = log.warning,
        inform: Tell = log.info,
    ) -> None:
        self._parameters = None
        self._set, self._sliced = [], WeakValueDictionary()
        super().attach(module, optimizers, comm, warn, inform)
        check_no_aliases(module)
        self.overlaps = False
        self._warn = warn
        parameters = ShardedParameters(comm, self._training)
        order = self.mirror_order or range(comm.world_size)
        self._mirrors = Mirrors(parameters, order) if self.mirrors_shards else None
        self._is_cut, self._changed = False, []
        self._reads = ParameterReads(parameters, module, warn)
        self._parameters = parameters  # last: `detach` is allowed after an `attach` that raised
        try:
            self.set_optimizers(optimizers)
        except BaseException:
            self.detach(wait=False)
            raise
        for sliced, whole in zip(self._set, self._moved or (), strict=False):
            sliced.replace_state(whole)
        self._moved = None

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers. Earlier ones stay sharded: stepping them is still allowed."""
        super().set_optimizers(optimizers)
        self._set = [self._slice(optimizer) for optimizer in optimizers]

    def detach(self, *, wait: bool = True) -> None:
        """Afterwards `optimizer_state_dict` still works, on all ranks together."""
        if self._parameters is not None and self.reducer is not None:
            if wait and not self._parameters.is_stepping:
                self.wait_parameters()
            elif not self._parameters.take_what_arrives(_ENDING_SECONDS):
                self._warn(
                    "training ended while new parameters were on their way to this rank: its "
                    "weights mix those before and after the last step. Go on from a checkpoint."
                )
            for optimizer in list(self._sliced.values()):
                optimizer.release()
            self._reads.remove()
            self._parameters.release()
        super().detach(wait=wait)

    def _follow_module(self) -> None:
        if self._parameters is not None:
            self.wait_parameters()
            # some may have left the module, and are still stepped
            check_no_aliases(self._module, self._training.tracked)
            self._reads.follow()

    def _slice(self, optimizer: Optimizer) -> SlicedOptimizer:
        """Have ``optimizer`` step this rank's shard, from now on."""
        if (known := self._sliced.get(id(optimizer))) is not None:
            return known
        check_can_be_sharded(optimizer)
        if self._mirrors is not None and hasattr(optimizer, "norm_all_reduce"):
            raise ConfigurationError(
                f"{type(optimizer).__name__} takes norms over all ranks in its step, which a rank "
                "must be able to finish alone in an elastic training under ring_sharded. Use "
                "strategy 'ring', or another optimizer."
            )
        sliced = SlicedOptimizer(optimizer, self._attached, self._stepped, self._mirrors)
        self._sliced[id(optimizer)] = sliced
        return sliced

    @property
    def _attached(self) -> ShardedParameters:
        assert self._parameters is not None, "attach() comes first"
        return self._parameters

    # -- a batch

    @contextmanager
    def forward(self, *, wait: bool = True) -> Iterator[None]:
        self._reads.begin_forward()
        # the compiler takes the size of a parameter's memory, which is that of a whole bucket once
        # it lies in one
        with nullcontext() if self._attached.buckets else super().forward():
            yield
        if wait:
            self.wait_parameters()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        super().before_step(optimizer, has_closure=has_closure)
        if self.steps_tracked_parameters(optimizer):
            # optimizers may be built in the middle of the training
            self._slice(optimizer).put_hooks_inside()

    def _stepped(self, changed: list[Parameter]) -> None:
        self._is_cut = True
        if self._mirrors is not None:
            self._changed = changed
            return
        parameters = self._attached
        parameters.end_step(changed)
        if self.overlaps and self._reads.trusted:
            parameters.hide()
        else:
            parameters.wait()

    # -- deaths

    def before_commit(self) -> None:
        if self._mirrors is not None:
            self._mirrors.receive()

    def after_commit(self) -> None:
        self._attached.gather(self._changed)
        self._attached.wait()
        self._changed = []

    def move(self, comm: Communicator) -> None:
        if self._parameters is not None:
            self._parameters.forget_gathers()
        standings: list[Standing] = comm.all_gather_object(self._standing(), name="standings")
        whole = next((rank for rank, one in enumerate(standings) if one.place is None), None)
        if whole is None:
            assert self._mirrors is not None
            held = [sliced.held_state() for sliced in self._set]
            self._moved = Rebuilding(self._attached, self._mirrors, standings, comm).run(held)
        elif any(one.place is not None for one in standings):
            # a rank died when others had moved
            self._moved = self._whole_of(whole, comm)
        else:
            self._moved = self._whole_states()
        if self._parameters is not None:
            for sliced in self._set:
                sliced.replace_state({})

    def _standing(self) -> Standing:
        if not self._is_cut or self._moved is not None:
            return Standing()
        assert self._mirrors is not None
        shards = self._attached.by_param
        same = all(param.requires_grad == (param in shards) for param in self._module.parameters())
        return Standing(
            self._mirrors.place, self._attached.comm.world_size, same and not self._changed
        )

    def _whole_states(self) -> list[State]:
        """By parameter, in a rank that holds all of them."""
        return self._moved or [sliced.held_state() for sliced in self._set]

    @torch.no_grad()
    def _whole_of(self, source: int, comm: Communicator) -> list[State]:
        """The states of the optimizers, and in place the parameters, of rank ``source``.
        Collective.
        """
        params, sent = list(self._module.parameters()), None
        if comm.rank == source:
            numbers = {param: number for number, param in enumerate(params)}
            states = [renamed(state, numbers) for state in self._whole_states()]
            sent = [param.detach() for param in params], states
        received = comm.broadcast_object(sent, src=source, name="optimizer state")
        assert received is not None
        for param, value in zip(params, received[0], strict=True):
            param.data.copy_(value)
        return [renamed(state, dict(enumerate(params))) for state in received[1]]

    # -- reading parameters and gradients

    def wait_parameters(self) -> None:
        if self._parameters is not None:
            self._parameters.wait()

    def show(self) -> None:
        """After an exception: make all parameters readable with their current values; new ones
        may never arrive.
        """
        self._attached.show()

    def clip_grad_norm_(
        self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        if self.reducer is None or not self.reducer.buckets:
            return clip_grad_norm_(parameters, max_norm, norm_type)
        self._attached.follow()
        return norms.clip_grad_norm_(parameters, max_norm, self._attached, norm_type)

    # -- checkpoints

    def of(self, optimizer: Any) -> SlicedOptimizer:
        """The hooks on ``optimizer``, which Lightning may have wrapped."""
        return self._sliced[id(getattr(optimizer, "_optimizer", optimizer))]

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        return self.of(optimizer).state_dict(is_rank_zero=is_rank_zero)

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        self.of(optimizer).load_state_dict(state)

    @contextmanager
    def states_shown(self) -> Iterator[None]:
        optimizers = self._set if self._parameters is not None else []
        for optimizer in optimizers:
            optimizer.show_state()
        try:
            yield
        finally:
            for optimizer in optimizers:
                optimizer.hide_state()
