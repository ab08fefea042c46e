"""Sharded training: sliced optimizers, and all-gathers of the parameters they step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.algorithms.sharded import norms
from lightning_ring.algorithms.sharded.aliases import check_no_aliases
from lightning_ring.algorithms.sharded.elementwise import check_can_be_sharded
from lightning_ring.algorithms.sharded.optimizer import SlicedOptimizer
from lightning_ring.algorithms.sharded.parameter_reads import ParameterReads
from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.comm.communicator import Communicator
from lightning_ring.gradients.shard_reducer import ShardReducer
from lightning_ring.gradients.squared_norms import squares_by_bucket


class Sharding:
    """Has ``optimizers`` step this rank's shard of the parameters of ``module``.

    A step starts an all-gather of each changed bucket. If ``overlaps`` is True the step returns at once, and reading a
    parameter inside `forward` or `reading` waits for its bucket. Else the step waits.

    Args:
        warn: Called with a message for the user.

    Raises:
        ConfigurationError: An optimizer needs full tensors, or two tensors of ``module`` share memory.
    """

    def __init__(
        self,
        comm: Communicator,
        reducer: ShardReducer,
        module: nn.Module,
        optimizers: Iterable[Optimizer],
        warn: Callable[[str], None],
    ) -> None:
        self.overlaps = False
        check_no_aliases(module)
        self._comm = comm
        self._module = module
        self._warn = warn
        self._quiet_about_norms = False  # lightning_ring computes one itself, or the warning was given
        self._parameters = ShardedParameters(comm, reducer)
        self._reads = ParameterReads(self._parameters, module, warn, self._on_norm)
        self._set: list[SlicedOptimizer] = []  # others live as long as their optimizers, through the hooks
        self._optimizers: WeakValueDictionary[int, SlicedOptimizer] = WeakValueDictionary()
        try:
            self.set_optimizers(optimizers)
        except BaseException:
            self.release(wait=False)
            raise

    def set_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Replace the optimizers. Earlier ones stay sharded: stepping them is still allowed."""
        self._set = [self.slice(optimizer) for optimizer in optimizers]

    def slice(self, optimizer: Optimizer) -> SlicedOptimizer:
        """Have ``optimizer`` step this rank's shard, from now on."""
        if (known := self._optimizers.get(id(optimizer))) is not None:
            return known
        check_can_be_sharded(optimizer)
        sliced = SlicedOptimizer(optimizer, self._parameters, self._stepped)
        self._optimizers[id(optimizer)] = sliced
        return sliced

    def reading(self) -> AbstractContextManager[None]:
        """Around code that may read parameters or compute norms of gradients."""
        return self._reads.watching(norms=True) if self.overlaps else nullcontext()

    @contextmanager
    def forward(self, *, wait: bool) -> Iterator[None]:
        """Around code that computes a loss. ``wait``: all parameters are complete at the end."""
        self._reads.begin_forward()
        with self._reads.watching(norms=not wait) if self.overlaps else nullcontext():
            yield
        if wait:
            self._parameters.wait()

    def follow_module(self) -> None:
        """Shard added modules and parameters too."""
        self.wait_parameters()
        check_no_aliases(self._module)
        self._reads.follow()

    def wait_parameters(self) -> None:
        """Return when all parameters are complete."""
        self._parameters.wait()

    def show(self) -> None:
        """After an exception: make all parameters readable with their current values."""
        self._parameters.show()

    def of(self, optimizer: Any) -> SlicedOptimizer:
        return self._optimizers[id(getattr(optimizer, "_optimizer", optimizer))]  # Lightning may have wrapped it

    def clip_grad_norm_(self, params: Iterable[Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        self._parameters.follow()
        before, self._quiet_about_norms = self._quiet_about_norms, True
        try:
            return norms.clip_grad_norm_(params, max_norm, self._parameters, norm_type)
        finally:
            self._quiet_about_norms = before

    def gradient_squares(self, params: Sequence[Parameter]) -> Tensor:
        """`squares_by_bucket` of this rank's parts of the gradients; collective the first time."""
        parameters = self._parameters
        parameters.follow()
        before, self._quiet_about_norms = self._quiet_about_norms, True
        try:
            parts = {param: parameters.own_gradient(param) for param in params if param in parameters.by_param}
            return squares_by_bucket(params, parameters.reducer.buckets, self._comm.world_size, parts)
        finally:
            self._quiet_about_norms = before

    def unscale_shards(self, unscale: Callable[..., Any]) -> Callable[..., Any]:
        return norms.unscale_shards(unscale, self.of, self._comm)

    @contextmanager
    def states_shown(self) -> Iterator[None]:
        """Around code that moves the optimizers' state to another device."""
        for optimizer in self._set:
            optimizer.show_state()
        try:
            yield
        finally:
            for optimizer in self._set:
                optimizer.hide_state()

    def release(self, *, wait: bool) -> None:
        """Restore module and optimizers. State dicts of the optimizers can still be gathered."""
        if wait:
            self.wait_parameters()
        for optimizer in list(self._optimizers.values()):
            optimizer.release()
        self._reads.remove()
        self._parameters.release()

    def _on_norm(self, values: Iterable[Any]) -> None:
        if self._quiet_about_norms or any(optimizer.holds_shards for optimizer in self._optimizers.values()):
            return
        if norms.contains_gradient(values, self._parameters):
            self._quiet_about_norms = True
            self._warn(
                "a norm of gradients was taken (torch.nn.utils.clip_grad_norm_ or the like). Under ring_sharded a "
                "gradient is valid in this rank's shard only, and NaN elsewhere: so is the norm. Clip "
                "with self.clip_gradients(...) or self.trainer.strategy.clip_grad_norm_(parameters, max_norm), which "
                "returns the norm over all ranks' shards (with max_norm=float('inf') it only measures)."
            )

    def _stepped(self, changed: list[Parameter]) -> None:
        self._parameters.gather(changed)
        if self.overlaps and self._reads.trusted:
            self._parameters.hide()
        else:
            self._parameters.wait()
