"""A hook on a module that copies of the module do not get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class UncopiedHook:
    """Calls ``hook``. A copy of the module, also a pickled one, has in its place a hook that
    does nothing.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> Any:
        # it takes any arguments, returns None, and is found where lightning_ring is not installed
        return getattr, (0, "__init__")
