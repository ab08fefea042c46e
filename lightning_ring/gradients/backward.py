"""Backward passes: which ones are reduced, the hooks that report their gradients, and gradients
that no optimizer may step.

The backward that Lightning runs for training is reduced (automatic optimization, or
``manual_backward``). With manual optimization a plain ``loss.backward()`` inside ``training_step``
is reduced too, unless code of the module's class names ``manual_backward``. Every other backward
stays local. A local gradient that ``zero_grad`` does not drop is sent with the next reduced
backward, as under DDP. An optimizer that is about to step a gradient of one rank alone is an error.

How a backward ends was tried on two ranks before this was written (`tests/checks/gradients`):

- Through Lightning the strategy ends it, whichever hooks fired.
- For a plain ``loss.backward()`` the hook queues a callback in the autograd engine, which runs
  once, after the last gradient. With reentrant checkpointing it runs at the end of *each inner*
  backward. The outermost one has ended when ``torch._C._current_autograd_node()`` is ``None``.
- If everything lies inside reentrant checkpoints there is no callback of the outermost backward; it
  is ended before the optimizer's step.
- A rank without any gradient takes part with zeros.
- Autograd deletes the callbacks of a backward that raises, without calling them, before the caller
  can catch the exception. What was sent is waited for in the next backward and dropped. What is
  left in ``param.grad`` becomes NaN, and ``zero_grad()`` must drop it before the next backward or
  step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_ring.comm.communicator import Communicator
from lightning_ring.errors import RingError
from lightning_ring.gradients.bucket import Bucket
from lightning_ring.gradients.delivery import average_


class BackwardPasses:
    """A backward is reduced inside `reduced`, or as a plain ``loss.backward()`` inside
    ``plain(reduced=True)``.

    Any other backward stays local: it sends nothing, and its gradients in ``param.grad`` are this
    rank's own. As under DistributedDataParallel, the next reduced backward sends all of
    ``param.grad``, and a parameter with a local gradient counts as used.

    Autograd's engine tells neither a hook of the parameters nor the caller of ``loss.backward()``
    that a backward has raised. But it deletes the callbacks of that backward without calling them
    (`_End`), before the caller can catch the exception.

    Args:
        begin: Starts the reduction of a backward, and sets ``active``.
        finish: Completes the reduction of the current backward, and clears ``active``. Does nothing
            without one.
        abandon: Called when the current backward has raised. It may neither send nor wait.

    Attributes:
        enabled: While False, backward leaves gradients local (`no_sync`).
        reduces: Whether a backward at this point belongs to the training.
        active: Whether a reduced backward has begun and is not finished.
        explicit: Whether the current backward runs inside `reduced`, which finishes it.
        discards: Whether gradients do not count (`discarding`).
    """

    def __init__(
        self,
        begin: Callable[[], None],
        finish: Callable[[], None],
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self.enabled = True
        self.reduces = False
        self.active = False
        self.explicit = False
        self.discards = False
        self._begin = begin
        self._finish = finish
        self._abandon = abandon
        # graph tasks, or nodes in them, of a plain backward that have yet to end
        self._awaited: set[object] = set()

    @contextmanager
    def reduced(self) -> Iterator[None]:
        self.note_raised()
        before, self.reduces = self.reduces, True
        try:
            if not self.enabled or self.active:
                yield
                return
            self._begin()
            self.explicit = True
            try:
                yield
                self._finish()
            except BaseException:
                self._raised()
                raise
            finally:
                self.explicit = self.active = False
        finally:
            self.reduces = before

    @contextmanager
    def plain(self, *, reduced: bool) -> Iterator[None]:
        if not reduced:
            self._finish()
        before, self.reduces = self.reduces, reduced
        try:
            yield
            if reduced:
                self._finish()
        finally:
            self.reduces = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    @contextmanager
    def discarding(self, params: Iterable[Parameter]) -> Iterator[None]:
        before = [(param, param.grad) for param in params]
        for param, _ in before:
            param.grad = None
        self.discards = True
        try:
            yield
        finally:
            self.discards = False
            for param, grad in before:
                param.grad = grad

    # -- the end of a plain backward

    def watch(self) -> None:
        """In a hook of a plain backward: have its end finish the reduction, and an exception
        abandon it.
        """
        task = torch._C._current_graph_task_id()
        if task not in self._awaited:
            self._awaited.add(task)
            Variable._execution_engine.queue_callback(_End(self, task))

    def note_raised(self) -> None:
        """Between two backwards: abandon a plain one that has begun and not ended."""
        if (
            self.active
            and not self.explicit
            and self._awaited
            and torch._C._current_graph_task_id() == -1
        ):
            self._raised()

    def task_ended(self, task: object) -> None:
        self._awaited.discard(task)
        outer = torch._C._current_autograd_node()
        if outer is None:
            try:
                self._finish()
            except BaseException:
                self._raised()
                raise
            return

        # this was the inner backward of a reentrant checkpoint, which is a node of the outer one:
        # that goes on

        def resume(*_: Any) -> None:
            handle.remove()
            if handle in self._awaited:
                self._awaited.remove(handle)
                self.watch()

        handle = outer.register_hook(resume)
        self._awaited.add(handle)

    def task_deleted(self, task: object) -> None:
        if task in self._awaited:
            self._raised()

    def _raised(self) -> None:
        self._awaited.clear()
        if self.active:
            self.active = False
            self._abandon()


class _End:
    """A callback at the end of one of the engine's graph tasks, which is deleted uncalled if the
    task raises.
    """

    def __init__(self, passes: BackwardPasses, task: object) -> None:
        self._passes = passes
        self._task = task

    def __call__(self) -> None:
        self._passes.task_ended(self._task)

    def __del__(self) -> None:
        self._passes.task_deleted(self._task)


class GradientHooks:
    """Calls ``on_gradient`` with each parameter whose ``.grad`` backward has just accumulated.

    Hooks that users registered on the same parameter may change the gradient: they must run first.
    The hook of this class moves behind them between two backward passes (`move_last`);
    ``order_changed`` tells whether, in this backward, a user's hook still had to run when a
    gradient was reported.
    """

    def __init__(self, on_gradient: Callable[[Parameter], None]) -> None:
        self._on_gradient = on_gradient
        # autograd has a thread for each device, and a module may be on several
        self._lock = threading.RLock()
        self._ids: dict[Parameter, int] = {}
        self._handles: list[RemovableHandle] = []
        self._not_last: list[Parameter] = []
        # torch refuses to swap a tensor that has one (`torch.utils.swap_tensors`): hooks would go
        # with the other tensor
        self._refs: list[weakref.ref[Parameter]] = []

    def add(self, param: Parameter) -> None:
        handle = param.register_post_accumulate_grad_hook(self._report)
        self._ids[param] = handle.id
        self._refs.append(weakref.ref(param))
        self.keep(handle)

    def keep(self, handle: RemovableHandle) -> None:
        """Have `remove` also remove another hook."""
        self._handles.append(handle)

    def _report(self, param: Parameter) -> None:
        with self._lock:
            self._on_gradient(param)

    @property
    def order_changed(self) -> bool:
        return bool(self._not_last)

    def check_order(self, param: Parameter) -> None:
        """Note whether a user's hook on ``param`` comes after ours."""
        hooks = param._post_accumulate_grad_hooks
        if len(hooks) > 1 and next(reversed(hooks)) != self._ids[param]:
            self._not_last.append(param)

    def move_last(self) -> None:
        """Run our hook after the user's from the next backward on."""
        for param in self._not_last:
            hooks, own = param._post_accumulate_grad_hooks, self._ids[param]
            if own in hooks:
                hooks[own] = hooks.pop(own)
        self._not_last.clear()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._refs.clear()


_TO_DO = "Use `checkpoint(..., use_reentrant=False)` to get the overlap back."


class GradientParts:
    """Ends the overlap on all ranks if a gradient comes in parts, and averages parts whose bucket
    was already sent.

    ``warn`` is called with a message for the user. Unless ``overlaps``, all buckets are sent at the
    end of backward.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.overlaps = True
        self._warn = warn
        self._found = False
        self._late: set[Parameter] = set()  # a part came after the bucket was sent

    def begin_backward(self) -> None:
        self._late.clear()

    def add(self, param: Parameter, *, sent: bool) -> None:
        """Backward produced a further part of the gradient of ``param``. ``sent``: its bucket
        was sent before.
        """
        self._found = True
        if sent:
            self._late.add(param)

    def agree(self, comm: Communicator) -> None:
        """After the first backward: end the overlap if some rank has gradients in several parts.
        Collective.
        """
        if any(comm.all_gather_object(self._found, name="gradients in parts")):
            self.overlaps = False
            self._warn(
                "backward produces a gradient in several parts (reentrant checkpointing of a "
                "module that is used more than once). Gradients are therefore sent after "
                f"backward, without overlap. {_TO_DO}"
            )

    def average_late(
        self, buckets: Sequence[Bucket], comm: Communicator, active_ranks: int | None, prefix: str
    ) -> None:
        """Average the parts in ``param.grad`` whose bucket was sent before, and add them to the
        bucket.

        Collective if there are any. ``prefix`` begins the names of the collectives.
        """
        late, self._late = self._late, set()
        if not late:
            return
        self.overlaps = False
        self._warn(
            "backward produced a gradient again after it had been sent (reentrant checkpointing "
            "of a module that is used more than once). It was sent a second time; from now on "
            f"gradients are sent after backward, without overlap. {_TO_DO}"
        )
        grads = {param: param.grad for param in late if param.grad is not None}
        for bucket in buckets:
            if not any(param in grads for param in bucket.params):
                continue
            flat = torch.zeros_like(bucket.flat)
            offset = bucket.flat.storage_offset()
            for param, view in zip(bucket.params, bucket.views, strict=True):
                if param in grads:
                    flat.as_strided(
                        view.size(), view.stride(), view.storage_offset() - offset
                    ).copy_(grads[param])
            average_(flat, comm, active_ranks, f"{prefix}late part of {bucket.describe()}").wait()
            bucket.flat.add_(flat)


class UnreducedGradients:
    """Parameters whose ``.grad`` holds values of this rank alone since before the current
    backward.
    """

    def __init__(self) -> None:
        # inside `no_sync`: the next reduced backward sends the gradient
        self.accumulated: set[Parameter] = set()
        self.local: set[Parameter] = set()  # by a backward outside the training; ranks may differ
        # gradients of a backward that raised, until ``zero_grad()``
        self._spoiled: dict[Parameter, Tensor] = {}

    def __contains__(self, param: Parameter) -> bool:
        return param in self.accumulated or (param in self.local and param.requires_grad)

    def drop_local(self, sent: Callable[[Parameter], bool]) -> None:
        """A backward has averaged the gradients of the trainable parameters for which ``sent``
        is true.
        """
        self.local = {param for param in self.local if not (param.requires_grad and sent(param))}

    def spoil(self, params: Sequence[Parameter]) -> None:
        """A backward that raised has changed the gradients of ``params``: they become NaN until
        ``zero_grad()``.

        Sent gradients are in a bucket instead of ``.grad``. One of them, the smallest, becomes NaN:
        after an exception memory may be short.
        """
        sent = [param for param in params if param.grad is None]
        if sent:
            smallest = min(sent, key=Parameter.numel)
            smallest.grad = torch.zeros_like(smallest)
        self._spoiled = {
            param: param.grad for param in {*self._spoiled, *params} if param.grad is not None
        }
        for grad in self._spoiled.values():
            _values(grad).fill_(torch.nan)

    def check_dropped(self, params: Iterable[Parameter], names: Mapping[Parameter, str]) -> None:
        """Raise `RingError` if one of ``params`` still has a gradient of a backward that raised."""
        chosen = self._spoiled.keys() & params if self._spoiled else ()
        for param in (param for param in names if param in chosen):  # the same order on all ranks
            # another gradient is of the backward that has begun, and may be NaN by itself
            if param.grad is self._spoiled[param] and _values(param.grad).isnan().any():
                raise RingError(
                    "a backward raised an exception before it had averaged the gradient of "
                    f"{names[param]}. What is left in .grad is incomplete. On all ranks call "
                    "zero_grad() before the next backward or step."
                )
            del self._spoiled[param]

    def check(self, params: Iterable[Parameter], names: Mapping[Parameter, str]) -> None:
        """Raise `RingError` if the gradient of one of ``params`` is local, or of a backward that
        raised.
        """
        if not (self.local or self._spoiled or self.accumulated):
            return
        params = list(params)
        self.check_dropped(params, names)
        left = [param for param in params if param.grad is not None and param.requires_grad]
        if late := [param for param in left if param in self.accumulated]:
            raise RingError(
                f"an optimizer is about to step {names[late[0]]} with a gradient of this rank "
                "alone: the last backward was inside no_sync(), so its gradient was never "
                "averaged. The ranks' parameters would drift apart. Run the last backward before "
                "each step outside of no_sync()."
            )
        if own := [param for param in left if param in self.local]:
            raise RingError(
                f"an optimizer is about to step {names[own[0]]} with a gradient of this rank "
                "alone: a backward outside the training added to it, and no backward of the "
                "training has averaged it since. The ranks' parameters would drift apart. With "
                "manual optimization use self.manual_backward(loss) for training. Drop gradients "
                "of any other backward with zero_grad(), or take them with "
                "torch.autograd.grad(...)."
            )


def check_outside_backward(optimizer: Optimizer) -> None:
    """Raise `RingError` if ``optimizer`` steps in a hook of backward, where gradients are not
    averaged yet.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RingError(
            f"{type(optimizer).__name__} steps inside backward (in a hook of a gradient or a "
            "module), where a gradient is this rank's alone: the ranks' parameters would drift "
            "apart. Call step() after backward."
        )


def closure_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[], Any] | None:
    """The closure of a step, from the arguments of a hook before it."""
    closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure  # args[0] is the optimizer


def around_closure(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    enter: Callable[[], object],
    leave: Callable[[], object],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a hook before the step returns so that ``enter`` is called before its closure, and
    ``leave`` after it. Without a closure ``leave`` is called now.
    """
    closure = closure_of(args, kwargs)
    if closure is None:
        leave()
        return None

    def entered() -> Any:
        enter()
        loss = closure()
        leave()
        return loss

    if len(args) > 1:
        return (args[0], entered, *args[2:]), kwargs
    return tuple(args), kwargs | {"closure": entered}


def _values(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad._values() if grad.is_sparse else grad
