"""Which operations of torch some code calls."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Notes functions, and arguments for an ``arguments`` of True, views left out: each call is a
    launch on a GPU. Whoever keeps arguments keeps gradients alive.
    """

    def __init__(self, arguments=False):
        super().__init__()
        self._arguments = arguments
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.calls.append((func, args if self._arguments else ()))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return [str(func.overloadpacket).removeprefix("aten.") for func, _ in self.calls]
