"""`DistributedOptimizer`: gradients travel in the buckets of `Reducer`, as under `RingStrategy`."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.comm.communicator import Communicator
from lightning_ring.comm.recording import RecordedCommunicator
from lightning_ring.comm.replicate import check_same_description, described, params_of
from lightning_ring.gradients.backward import check_outside_backward, closure_of
from lightning_ring.gradients.compression import COMPRESSORS, Compressor
from lightning_ring.gradients.reducer import Reducer
from lightning_ring.horovod.collectives import Average, Sum, reduction
from lightning_ring.horovod.compression import Compression
from lightning_ring.horovod.context import (
    ProcessSet,
    attachments,
    global_process_set,
    gradient_communicator,
)
from lightning_ring.horovod.requests import GRADIENTS

Named = list[tuple[str, Parameter]]


def DistributedOptimizer(
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: str = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Have ``optimizer`` step gradients that are reduced over all ranks. Returns the same object.

    It gets the methods ``synchronize()``, which completes the gradients (for clipping),
    ``skip_synchronize()``, around the step after it, and ``set_backward_passes_per_step()``. All
    ranks call it, in one order.

    Args:
        named_parameters: All parameters of the optimizer, with a name of its own each.
        compression: ``Compression.none``, ``fp16`` or ``bf16``; or one of `RingStrategy`'s, by its
            name (``"int8"``) or as an object of `lightning_ring.gradients.compression`. What an
            error feedback keeps is in no state dict.
        backward_passes_per_step: Backwards whose gradients are summed before they are reduced.
        op: Average or Sum of the gradients.
        gradient_predivide_factor: Only with Average; buckets divide by themselves, without
            overflow.
        num_groups, groups: Accepted; buckets take the place of groups.
        sparse_as_dense: Send sparse gradients as dense ones.
        process_set: The ranks that train together; on others the optimizer stays as it is.

    Raises:
        ValueError: Names or another argument cannot work.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if reduction(None, op) not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer got op={op}, expected Average or Sum.")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    compressor = _compressor_of(compression)
    named = _named(optimizer, named_parameters)
    optimizer._parameter_names = {param: name for name, param in named}  # type: ignore[attr-defined]
    attachments.pop(optimizer, None)
    averaging = _Averaging(
        named, process_set, compressor, backward_passes_per_step, op, sparse_as_dense
    )
    averaging.attach(optimizer)
    attachments[optimizer] = averaging
    return optimizer


def _compressor_of(compression: Any) -> Compressor | None:
    if isinstance(compression, Compressor):
        return compression
    if compression is Compression.none:
        return None
    name = getattr(compression, "name", compression)
    if name in COMPRESSORS:
        return COMPRESSORS[name].build()
    raise ValueError(
        f"DistributedOptimizer got compression={compression!r}, expected Compression.none, fp16 or "
        f"bf16, one of {', '.join(COMPRESSORS)} or a Compressor of "
        "lightning_ring.gradients.compression."
    )


def _named(optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None) -> Named:
    params = params_of(optimizer)
    if named_parameters is None:
        return [(f"parameter.{index}", param) for index, param in enumerate(params)]
    named = list(named_parameters)
    if not all(isinstance(pair, tuple) and isinstance(pair[0], str) for pair in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually "
            "model.named_parameters()."
        )
    counts = Counter(name for name, _ in named)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise ValueError(
            "Parameter names in named_parameters must be unique. Found duplicates: "
            f"{', '.join(twice)}"
        )
    unnamed = {id(param) for param in params} - {id(param) for _, param in named}
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named "
            f"({len(unnamed)} of them)."
        )
    return named


@dataclass
class _Averaging:
    """Reduces the gradients of one optimizer: a reducer, and the hooks that complete it."""

    named: Named
    process_set: ProcessSet
    compression: Compressor | None
    passes: int
    op: str
    sparse_as_dense: bool
    _hooks: list[Any] = field(default_factory=list)

    def attach(self, optimizer: Any) -> None:
        optimizer.set_backward_passes_per_step = self.set_backward_passes_per_step
        ranks = self.process_set
        if ranks.process_set_id is not None and (not ranks.included() or ranks.size() == 1):
            optimizer.synchronize = lambda: None
            optimizer.skip_synchronize = ExitStack
            return
        self._negotiation = ranks.negotiation
        number = self._negotiation.num_optimizers
        self._negotiation.meet(f"DistributedOptimizer {number}", self.op)
        self._negotiation.num_optimizers += 1
        device = next((param.device for _, param in self.named), torch.device("cpu"))
        comm = gradient_communicator(ranks, device)
        passes = {"backward_passes_per_step": str(self.passes)}
        check_same_description(described("parameter", self.named) | passes, comm)
        self._name = f"{GRADIENTS} of optimizer {number}"
        self._negotiation.gradients[self._name] = self
        label = f"optimizer {number}: " if number else ""
        self._reduce(optimizer, RecordedCommunicator(comm, [], label))
        optimizer.synchronize = self.synchronize
        optimizer.skip_synchronize = self.skip_synchronize

    def _reduce(self, optimizer: Optimizer, comm: Communicator) -> None:
        self._own = params_of(optimizer)
        self._counts: Counter[Tensor] = Counter()
        self._completed = False
        self._skips = False
        self._has_joined = False
        # of the last reduction after `join`
        self._averages: Sequence[Tensor | None] = ()
        self._stepped = True  # since the last reduction, or there was none
        self._sparse: set[Tensor] = set()  # they travel dense
        params = dict.fromkeys(param for _, param in self.named)
        frozen = [one for one in params if not one.requires_grad and one.is_floating_point()]
        for param in frozen:
            # for a moment, for those that become trainable later
            param.requires_grad_(True)
        self._hooks = [
            # before the reducer's
            param.register_post_accumulate_grad_hook(self._count)
            for param in params
            if param.requires_grad
        ]
        # without the residuals of an earlier generation
        compressor = copy.deepcopy(self.compression)
        if compressor is not None:
            compressor.check_optimizers([optimizer])
        self._reducer = Reducer(
            comm,
            self.named,
            compressor=compressor,
            gathers_sparse=not self.sparse_as_dense,
            # its messages name RingStrategy's arguments
            warn=lambda text: None,
            before_backward=self._before_backward,
        )
        self._reducer.num_steps = -1  # the first reduction counts one
        for param in frozen:
            param.requires_grad_(False)
        self._whole = self._reducer.plain_backwards(reduced=True)
        self._whole.__enter__()
        self._pause = ExitStack()
        self._begin_step()
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._finalizer = finalize(optimizer, self._reducer.remove)
        self._finalizer.atexit = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the argument between two steps. All ranks call it."""
        self.passes = passes
        if self._hooks:
            self._begin_step()

    def detach(self) -> None:
        """Leave the optimizer and its parameters as they were, without waiting for other ranks."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._finalizer()  # removes the reducer's
        for _, param in self.named:
            # in memory of the last generation
            param.grad = None

    def synchronize(self) -> None:
        """Complete the gradients. Collective: a rank without gradients takes part with zeros."""
        self._pause.close()
        self._reducer.finish()
        if self._reducer.num_finished == self._finished_before:
            if not self._counts:  # without a backward
                self._reducer.take_assigned()
            with self._reducer.backward():
                pass
        grads = [param.grad for param in self._own if param.grad is not None]
        if self.op == Sum and grads and not self._completed:
            torch._foreach_mul_(grads, float(self.process_set.size()))
        for param in self._sparse:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)
        self._completed = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def send_zeros(self, *, again: bool) -> None:
        """After `join`: take part in a reduction of the others."""
        self._has_joined, self._stepped = True, not again
        try:
            self._averages = self._reducer.send_zeros(self._averages if again else ())
        finally:
            self._has_joined = False
        self._finished_before += 1
        self._stepped = True  # as for the others before they join

    def _before_backward(self) -> None:
        self._reducer.num_steps += self._stepped
        if not self._has_joined:
            self._averages = ()
            self._negotiation.announce(self._name, again=not self._stepped)
        self._stepped = self._completed = False

    def _begin_step(self) -> None:
        self._counts.clear()
        self._completed = False
        self._finished_before = self._reducer.num_finished
        self._pause.close()
        if self.passes > 1:
            self._pause.enter_context(self._reducer.no_sync())

    def _count(self, param: Tensor) -> None:
        if param.grad is not None and param.grad.is_sparse and not self._reducer.gathers_sparse:
            self._sparse.add(param)
        self._counts[param] += 1
        if self._counts[param] == self.passes:
            self._pause.close()

    def _before_step(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        check_outside_backward(optimizer)
        if self.op == Sum and closure_of(args, kwargs) is not None:
            raise ValueError(
                "step(closure) was called with DistributedOptimizer(op=Sum). The gradients of the "
                "closure would be averaged, not summed. Use op=Average and multiply the learning "
                "rate by hvd.size(), or call step() without a closure."
            )
        if self._skips:
            return
        if self._completed:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after "
                "optimizer.synchronize(). This can cause training slowdown. You may want to "
                "consider using optimizer.skip_synchronize() context if you use "
                "optimizer.synchronize() in your code.",
                stacklevel=3,
            )
        self.synchronize()

    def _after_step(self, *_: Any) -> None:
        self._stepped = True
        self._begin_step()
