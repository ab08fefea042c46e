"""Which backward passes average their gradients over ranks. The others leave them local."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import Parameter


class BackwardPasses(ABC):
    """A backward is reduced inside `backward`, or as a plain ``loss.backward()`` inside `plain_backwards`.

    Any other backward stays local: it sends nothing, and its gradients in ``param.grad`` are this rank's own. As under
    DistributedDataParallel, the next reduced backward sends all of ``param.grad``, and a parameter with a local
    gradient counts as used.
    """

    def __init__(self) -> None:
        self.reduces_plain_backwards = False  # whether a backward at this point belongs to the training
        self._names: dict[Parameter, str] = {}  # of all parameters whose gradients are averaged
        self._enabled = True  # False inside `no_sync`
        self._active = False  # a reduced backward has begun and is not finished
        self._explicit = False  # the current backward runs inside `backward`, which finishes it
        self._discards = False  # gradients do not count

    @abstractmethod
    def _begin(self) -> None:
        """Start the reduction of a backward, and set ``_active``."""

    @abstractmethod
    def finish(self) -> None:
        """Complete the reduction of the current backward, and clear ``_active``. Does nothing without one."""

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the outermost backward: on leaving, gradients are averaged. Nothing happens inside `no_sync`."""
        before, self.reduces_plain_backwards = self.reduces_plain_backwards, True
        try:
            if not self._enabled or self._active:
                yield
                return
            self._begin()
            self._explicit = True
            try:
                yield
                self.finish()
            finally:
                self._explicit = self._active = False
        finally:
            self.reduces_plain_backwards = before

    @contextmanager
    def plain_backwards(self, *, reduced: bool) -> Iterator[None]:
        """Around code whose plain ``loss.backward()`` is reduced, or stays local."""
        if not reduced:
            self.finish()
        before, self.reduces_plain_backwards = self.reduces_plain_backwards, reduced
        try:
            yield
            if reduced:
                self.finish()
        finally:
            self.reduces_plain_backwards = before

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around backwards that leave gradients local. The next backward outside sends them."""
        before, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = before

    @contextmanager
    def discarding(self) -> Iterator[None]:
        """Around a backward that changes no ``param.grad`` and sends nothing."""
        before = [(param, param.grad) for param in self._names]
        for param, _ in before:
            param.grad = None
        self._discards = True
        try:
            yield
        finally:
            self._discards = False
            for param, grad in before:
                param.grad = grad
