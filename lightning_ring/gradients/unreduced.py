"""Gradients that no optimizer may step: of this rank alone, or of a backward that raised."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_ring.errors import RingError


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


def has_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``step(closure)`` was called, from the arguments of a hook before the step."""
    return len(args) > 1 or kwargs.get("closure") is not None  # args[0] is the optimizer


def _values(grad: Tensor) -> Tensor:
    grad = grad.detach()
    return grad._values() if grad.is_sparse else grad
