"""`Sharded`: the algorithm behind ``strategy="ring_sharded"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lightning_ring.algorithms.algorithm import Algorithm, log
from lightning_ring.algorithms.averaging import Averaging
from lightning_ring.algorithms.sharded.sharding import Sharding
from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.compression import Compressor
from lightning_ring.gradients.shard_reducer import ShardReducer


class Sharded(Algorithm):
    """Gradients are reduce-scattered, each rank steps its shard, and parameters are all-gathered.

    The all-gather overlaps the next forward.

    Args:
        bucket_cap_mb: As of `Averaging`.
        compression: As of `Averaging`; parameters always travel in their own dtype.
    """

    sharded: ClassVar[bool] = True

    def __init__(
        self,
        *,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        compression: str | Compressor | None = None,
    ) -> None:
        self.sharding: Sharding | None = None
        self._averaging = Averaging(
            bucket_cap_mb=bucket_cap_mb,
            compression=compression,
            shards=True,
            on_new_parameters=self._follow_module,
        )

    # -- begin and end

    def attach(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        comm: Communicator,
        warn: Callable[[str], None] = log.warning,
        inform: Callable[[str], None] = log.info,
    ) -> None:
        self._averaging.attach(module, optimizers, comm, warn, inform)
        reducer = self._averaging.reducer
        assert isinstance(reducer, ShardReducer)
        self.sharding = Sharding(comm, reducer, module, optimizers, warn)

    def set_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._averaging.set_optimizers(optimizers)
        self._training.set_optimizers(optimizers)

    def detach(self, *, wait: bool = True) -> None:
        """Afterwards `optimizer_state_dict` still works, on all ranks together."""
        if self.sharding is not None and self.reducer is not None:
            self.sharding.release(wait=wait)
        self._averaging.detach(wait=wait)

    def _follow_module(self) -> None:
        if self.sharding is not None:
            self.sharding.follow_module()

    @property
    def reducer(self) -> ShardReducer | None:
        reducer = self._averaging.reducer
        assert reducer is None or isinstance(reducer, ShardReducer)
        return reducer

    @property
    def _training(self) -> Sharding:
        assert self.sharding is not None, "attach() comes first"
        return self.sharding

    # -- a batch

    def begin_batch(self, active_ranks: int | None = None) -> None:
        self._averaging.begin_batch(active_ranks)

    def forward(self, *, wait: bool = True) -> AbstractContextManager[None]:
        return self._training.forward(wait=wait)

    def backward(self) -> AbstractContextManager[None]:
        return self._averaging.backward()

    def plain_backwards(self, *, reduced: bool) -> AbstractContextManager[None]:
        return self._averaging.plain_backwards(reduced=reduced)

    @property
    def reduces_plain_backwards(self) -> bool:
        return self._averaging.reduces_plain_backwards

    def no_sync(self) -> AbstractContextManager[None]:
        return self._averaging.no_sync()

    def discarding(self) -> AbstractContextManager[None]:
        return self._averaging.discarding()

    def before_step(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        self._averaging.before_step(optimizer, has_closure=has_closure)
        if self._averaging.steps_tracked_parameters(optimizer):
            self._training.slice(optimizer)  # optimizers may be built in the middle of the training

    def check_gradients(self, optimizer: Optimizer) -> None:
        self._averaging.check_gradients(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        self._averaging.after_step(optimizer)

    # -- reading parameters and gradients

    @property
    def overlaps(self) -> bool:
        """Whether a step returns before all parameters are complete. Reading a parameter then waits for it."""
        return self._training.overlaps

    @overlaps.setter
    def overlaps(self, value: bool) -> None:
        self._training.overlaps = value

    def reading(self) -> AbstractContextManager[None]:
        return self._training.reading()

    def wait_parameters(self) -> None:
        if self.sharding is not None:
            self.sharding.wait_parameters()

    def show(self) -> None:
        """After an exception: make all parameters readable with their current values; new ones may never arrive."""
        self._training.show()

    def clip_grad_norm_(self, parameters: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        if self.reducer is None:
            return clip_grad_norm_(parameters, max_norm, norm_type)
        return self._training.clip_grad_norm_(parameters, max_norm, norm_type)

    def unscale_shards(self, unscale: Callable[..., Any]) -> Callable[..., Any]:
        """A loss scaler's ``unscale`` for sharded gradients: an infinity on one rank counts on all."""
        return self._training.unscale_shards(unscale)

    @property
    def num_buckets(self) -> int:
        return self._averaging.num_buckets

    def gradient_squares(self, parameters: Sequence[Parameter]) -> Tensor:
        return self._training.gradient_squares(parameters)

    # -- checkpoints

    def optimizer_state_dict(self, optimizer: Any, *, is_rank_zero: bool) -> dict[str, Any]:
        return self._training.of(optimizer).state_dict(is_rank_zero=is_rank_zero)

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        self._training.of(optimizer).load_state_dict(state)

    def states_shown(self) -> AbstractContextManager[None]:
        return self.sharding.states_shown() if self.sharding is not None else nullcontext()

    def state_dict(self) -> dict[str, Any]:
        return self._averaging.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> str:
        return self._averaging.load_state_dict(state)

    # -- requests to stop, progress

    def ask_to_stop(self, asked: bool = True) -> None:
        self._averaging.ask_to_stop(asked)

    def agreed_to_stop(self) -> bool:
        return self._averaging.agreed_to_stop()

    def progress(self) -> str:
        return self._averaging.progress()

    def description(self) -> str:
        return self._averaging.description()
