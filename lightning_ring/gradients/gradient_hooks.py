"""Hooks that report gradients, and their order among the user's hooks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle


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
