"""Gradients of this rank that no collective has averaged yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch.nn import Parameter

from lightning_ring.errors import RingError


class UnreducedGradients:
    """Parameters whose ``.grad`` holds values of this rank alone since before the current backward."""

    def __init__(self) -> None:
        self.accumulated: set[Parameter] = set()  # inside `no_sync`: the next reduced backward sends the gradient
        self.local: set[Parameter] = set()  # by a backward outside the training; ranks may differ

    def __contains__(self, param: Parameter) -> bool:
        return param in self.accumulated or (param in self.local and param.requires_grad)

    def drop_local(self, sent: Callable[[Parameter], bool]) -> None:
        """A backward has averaged the gradients of the trainable parameters for which ``sent`` is true."""
        self.local = {param for param in self.local if not (param.requires_grad and sent(param))}

    def check(self, params: Iterable[Parameter], names: Mapping[Parameter, str]) -> None:
        """Raise `RingError` if the gradient of one of ``params`` is local."""
        if not self.local:
            return
        own = [param for param in params if param in self.local and param.grad is not None and param.requires_grad]
        if own:
            raise RingError(
                f"an optimizer is about to step {names[own[0]]} with a gradient of this rank alone: a backward outside "
                "the training added to it, and no backward of the training has averaged it since. The ranks' "
                "parameters would drift apart. With manual optimization use self.manual_backward(loss) for training. "
                "Drop gradients of any other backward with zero_grad(), or take them with torch.autograd.grad(...)."
            )
