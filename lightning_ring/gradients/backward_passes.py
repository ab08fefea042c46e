"""Which backward passes average their gradients over ranks. The others leave them local."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch.nn import Parameter


class BackwardPasses:
    """A backward is reduced inside `reduced`, or as a plain ``loss.backward()`` inside ``plain(reduced=True)``.

    Any other backward stays local: it sends nothing, and its gradients in ``param.grad`` are this rank's own. As under
    DistributedDataParallel, the next reduced backward sends all of ``param.grad``, and a parameter with a local
    gradient counts as used.

    Args:
        begin: Starts the reduction of a backward, and sets ``active``.
        finish: Completes the reduction of the current backward, and clears ``active``. Does nothing without one.

    Attributes:
        enabled: While False, backward leaves gradients local (`no_sync`).
        reduces: Whether a backward at this point belongs to the training.
        active: Whether a reduced backward has begun and is not finished.
        explicit: Whether the current backward runs inside `reduced`, which finishes it.
        discards: Whether gradients do not count (`discarding`).
    """

    def __init__(self, begin: Callable[[], None], finish: Callable[[], None]) -> None:
        self.enabled = True
        self.reduces = False
        self.active = False
        self.explicit = False
        self.discards = False
        self._begin = begin
        self._finish = finish

    @contextmanager
    def reduced(self) -> Iterator[None]:
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
