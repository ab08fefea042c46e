"""Which backward passes average their gradients over ranks. The others leave them local."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import Variable
from torch.nn import Parameter


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
