"""`DistributedOptimizer`: gradients travel in the buckets of `Reducer`, as under `RingStrategy`."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import finalize, ref

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

    It gets the methods ``synchronize()``, which completes the gradients, for clipping them,
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
        ValueError: The names do not fit the parameters, or an argument cannot work.
    """
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if reduction(None, op) not in (Average, Sum):
        raise ValueError(f"DistributedOptimizer got op={op}, expected Average or Sum.")
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    wire_format = _format_of(compression)
    named = _named(optimizer, named_parameters)
    optimizer._parameter_names = {param: name for name, param in named}  # type: ignore[attr-defined]
    attachments.pop(optimizer, None)
    averaging = _Averaging(
        ref(optimizer),
        named,
        process_set,
        wire_format,
        backward_passes_per_step,
        op,
        sparse_as_dense,
    )
    averaging.attach()
    attachments[optimizer] = averaging
    return optimizer


def _format_of(compression: Any) -> str | Compressor | None:
    """A name of `COMPRESSORS`, or a compressor."""
    if isinstance(compression, Compressor) or compression is Compression.none:
        return compression if isinstance(compression, Compressor) else None
    name = compression if isinstance(compression, str) else getattr(compression, "name", None)
    if name in COMPRESSORS:
        return name
    raise ValueError(
        f"DistributedOptimizer got compression={compression!r}, expected Compression.none, fp16 or "
        f"bf16, one of {', '.join(COMPRESSORS)} or a Compressor of "
        "lightning_ring.gradients.compression."
    )


def _named(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Parameter]] | None
) -> list[tuple[str, Parameter]]:
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


@dataclass(slots=True)
class _Averaging:
    """An optimizer and how its gradients are reduced, over the ranks of one generation after the
    other.
    """

    optimizer: ref[Optimizer]
    named: Named
    process_set: ProcessSet
    compression: str | Compressor | None
    passes: int
    op: str
    sparse_as_dense: bool
    gradients: _Gradients | None = None

    def attach(self) -> None:
        if self.process_set.process_set_id is None:
            raise ValueError(
                f"DistributedOptimizer: the process set of ranks {self.process_set.ranks} is not "
                "there. Add it first, with hvd.add_process_set; it ends when the ranks of an "
                "elastic job change."
            )
        if self.process_set.included() and self.process_set.size() > 1:
            negotiation = self.process_set.negotiation
            negotiation.meet(f"DistributedOptimizer {negotiation.num_optimizers}", self.op)
        device = next((param.device for _, param in self.named), torch.device("cpu"))
        comm = gradient_communicator(self.process_set, device)
        optimizer: Any = self.optimizer()
        if optimizer is None:
            return
        optimizer.set_backward_passes_per_step = self.set_backward_passes_per_step
        if comm is not None and comm.world_size > 1:
            passes = {"backward_passes_per_step": str(self.passes)}
            check_same_description(described("parameter", self.named) | passes, comm)
            self.gradients = _Gradients(optimizer, self, comm)
            optimizer.synchronize = self.gradients.synchronize
            optimizer.skip_synchronize = self.gradients.skip_synchronize
        else:
            optimizer.synchronize = lambda: None
            optimizer.skip_synchronize = ExitStack

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the argument of `DistributedOptimizer`, between two steps. All ranks call it."""
        self.passes = passes
        if self.gradients is not None:
            self.gradients.begin_step()

    def detach(self) -> None:
        gradients, self.gradients = self.gradients, None
        if gradients is not None:
            gradients.remove()
            for _, param in self.named:
                # part of a step that is done again, in memory of the last generation
                param.grad = None


class _Gradients:
    """The gradients of one optimizer: a reducer, and the hooks that complete it before a step."""

    def __init__(self, optimizer: Optimizer, how: _Averaging, comm: Communicator) -> None:
        self._how = how
        self._counts: Counter[Tensor] = Counter()
        self._synchronized = False
        self._completed = False  # since the last step
        self._skips = False
        self._has_joined = False
        # of the last reduction that this rank took part in by joining
        self._averages: Sequence[Tensor | None] = ()
        self._stepped = True  # since the last reduction, or there was none
        self._world_size = comm.world_size
        self._sparse: set[Tensor] = set()  # with gradients that travel dense
        self._negotiation = how.process_set.negotiation
        number = self._negotiation.num_optimizers
        self._negotiation.num_optimizers += 1
        self._name = f"{GRADIENTS} of optimizer {number}"
        self._negotiation.gradients[self._name] = self
        params = dict.fromkeys(param for _, param in how.named)
        frozen = [one for one in params if not one.requires_grad and one.is_floating_point()]
        for param in frozen:
            # for a moment: those that become trainable later are reduced too
            param.requires_grad_(True)
        self._hooks: list[Any] = [
            # before the reducer's
            param.register_post_accumulate_grad_hook(self._count)
            for param in params
            if param.requires_grad
        ]
        # a new one, without what an earlier generation has kept
        compressor = copy.deepcopy(how.compression)
        if isinstance(compressor, str):
            compressor = COMPRESSORS[compressor].build()
        if compressor is not None:
            compressor.check_optimizers([optimizer])
        self._reducer = Reducer(
            RecordedCommunicator(comm, [], f"optimizer {number}: " if number else ""),
            how.named,
            compressor=compressor,
            gathers_sparse=not how.sparse_as_dense,
            # what a reducer says of sparse gradients names RingStrategy's arguments
            warn=lambda text: None,
            before_backward=self._before_backward,
        )
        self._reducer.num_steps = -1  # the first reduction counts one
        for param in frozen:
            param.requires_grad_(False)
        self._whole = ExitStack()
        self._whole.enter_context(self._reducer.plain_backwards(reduced=True))
        self._pause = ExitStack()
        self.begin_step()
        self._hooks += [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        self._finalizer = finalize(optimizer, self._reducer.remove)
        self._finalizer.atexit = False

    def remove(self) -> None:
        """Leave the optimizer and its parameters as they were. What is under way is not waited
        for.
        """
        for hook in self._hooks:
            hook.remove()
        self._finalizer()  # removes the reducer's

    def synchronize(self) -> None:
        """Complete the gradients. Collective: a rank without gradients takes part with zeros."""
        self._pause.close()
        self._reducer.finish()
        if not self._is_reduced():
            if not self._counts:  # without a backward, what code of the script has put there
                self._reducer.take_assigned()
            with self._reducer.backward():
                pass
        optimizer = self._how.optimizer()
        if self._how.op == Sum and not self._completed and optimizer is not None:
            own = params_of(optimizer)
            grads = [param.grad for param in own if param.grad is not None]
            if grads:
                torch._foreach_mul_(grads, float(self._world_size))
        for param in self._sparse:
            if param.grad is not None and not param.grad.is_sparse:
                param.grad = param.grad.to_sparse(1)
        self._synchronized = self._completed = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Around a step whose gradients `synchronize` has completed."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def send_zeros(self, *, again: bool) -> None:
        """Take part where the others reduce their gradients, after `join`: see
        `negotiation.Gradients`.
        """
        self._has_joined, self._stepped = True, not again
        try:
            self._averages = self._reducer.send_zeros(self._averages if again else ())
        finally:
            self._has_joined = False
        self._finished_before += 1
        self._stepped = True  # as the others will have before they join

    def _before_backward(self) -> None:
        self._reducer.num_steps += self._stepped
        if not self._has_joined:
            self._averages = ()
            self._negotiation.announce(self._name, again=not self._stepped)
        self._stepped = self._completed = False

    def _is_reduced(self) -> bool:
        return self._reducer.num_finished > self._finished_before

    def begin_step(self) -> None:
        self._counts.clear()
        self._synchronized = self._completed = False
        self._finished_before = self._reducer.num_finished
        self._pause.close()
        if self._how.passes > 1:
            self._pause.enter_context(self._reducer.no_sync())

    def _count(self, param: Tensor) -> None:
        if param.grad is not None and param.grad.is_sparse and not self._reducer.gathers_sparse:
            self._sparse.add(param)
        self._counts[param] += 1
        if self._counts[param] == self._how.passes:
            self._pause.close()

    def _before_step(
        self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        check_outside_backward(optimizer)
        if self._how.op == Sum and closure_of(args, kwargs) is not None:
            raise ValueError(
                "step(closure) was called with DistributedOptimizer(op=Sum). The gradients of the "
                "closure would be averaged, not summed. Use op=Average and multiply the learning "
                "rate by hvd.size(), or call step() without a closure."
            )
        if self._skips:
            return
        if self._synchronized:
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
        self.begin_step()
