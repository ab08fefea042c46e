"""Hooks that wait for a parameter's all-gather where code reads the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_ring.algorithms.sharded.compiled_code import find_unseen_reader
from lightning_ring.algorithms.sharded.norms import NORMS
from lightning_ring.algorithms.sharded.parameters import ShardedParameters

_DESCRIBES = ("shape", "grad", "requires_grad", "device", "dtype", "is_leaf", "grad_fn", "ndim", "layout", "is_sparse")
_DESCRIPTORS = [
    vars(torch._C.TensorBase)[name] if name in vars(torch._C.TensorBase) else getattr(Tensor, name)
    for name in _DESCRIBES
]
_READS_NO_VALUES = {  # no wait for the all-gather
    *(accessor for descriptor in _DESCRIPTORS for accessor in (descriptor.__get__, descriptor.__set__)),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__, Tensor.__hash__),
    *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
}


class ParameterReads:
    """Reading a parameter waits for the all-gather of its bucket.

    Two mechanisms detect a read. A forward pre-hook covers each module's own parameters. Inside `watching`, a
    `TorchFunctionMode` covers every call of torch from Python (tied weights, ``F.linear(x, emb.weight)``, methods other
    than ``forward``, tensors that share a parameter's memory, `torch.func`). Scripted or compiled code outside its
    module's call and other threads are not covered: there, a read before the all-gather has finished is an error
    (`ParameterBucket.hide`).

    That error is rare. If `find_unseen_reader` finds scripted or compiled code, each step waits for all parameters.
    Steps also wait once a parameter gets a gradient and no read was detected: its first gradient comes from a forward
    in which all parameters were complete. ``trusted`` tells whether every read is detected.

    ``on_norm`` is called with the arguments of each norm of tensors inside `watching`.
    """

    def __init__(
        self,
        parameters: ShardedParameters,
        module: nn.Module,
        warn: Callable[[str], None],
        on_norm: Callable[[Iterable[Any]], None],
    ) -> None:
        self.trusted = True
        self.on_norm = on_norm
        self._parameters = parameters
        self._module = module
        self._warn = warn
        self._seen: set[int] = set()
        self._ids: dict[int, Parameter] = {}
        self._mode = _Watch(self)
        self._watching = False
        self._watched = False  # since this forward began
        self._hooks: dict[nn.Module, Any] = {}
        parameters.reducer.on_gradient = self._on_gradient
        self.follow()
        if unseen := find_unseen_reader(module):
            self.trusted = False
            warn(
                f"{unseen} is scripted or compiled, and may read parameters where lightning_ring cannot see it. All "
                "parameters are waited for after each step, instead of arriving while the next forward goes on."
            )

    def follow(self) -> None:
        """Watch new modules and parameters too."""
        self._ids.update((id(param), param) for param in self._module.parameters())
        for module in self._module.modules():
            scripted = isinstance(module, torch.jit.ScriptModule)  # does not support hooks
            if module not in self._hooks and not scripted and next(_own_parameters(module), None) is not None:
                self._hooks[module] = module.register_forward_pre_hook(_BeforeForward(self), prepend=True)

    @contextmanager
    def watching(self, *, norms: bool) -> Iterator[None]:
        """Around code that may read parameters or, with ``norms``, compute norms of gradients."""
        # an overridden `optimizer_step` contains the training step: a mode entered twice would see its own calls
        if self._watching or (not self.trusted and not norms):
            yield
            return
        self._watched = self._watching = True
        try:
            with self._mode:
                yield
        finally:
            self._watching = False

    def begin_forward(self) -> None:
        self._seen.clear()
        self._watched = self._watching

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._parameters.reducer.on_gradient = None

    def read(self, param_id: int) -> None:
        self._seen.add(param_id)
        if not self._parameters.complete:
            self._parameters.wait_for(param_id)

    def look_at(self, value: Any) -> None:
        """``value`` is an argument of a call of torch."""
        if id(value) in self._ids:
            self.read(id(value))
        elif not self._parameters.complete and isinstance(value, Tensor):
            self._parameters.wait_for_memory(value)

    def before_forward(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return  # compiled code would not contain this
        if self.trusted or not self._parameters.complete:
            for param in _own_parameters(module):
                self.read(id(param))

    def _on_gradient(self, param: Parameter) -> None:
        if id(param) in self._seen or not self.trusted or not self._watched:
            return
        name = next((name for name, other in self._module.named_parameters() if other is param), "a parameter")
        self.trusted = False
        self._warn(
            f"{name} got a gradient, but neither its module's forward nor any call of torch from Python was seen "
            "reading it (scripted or compiled code). From now on all parameters are waited for after each step, "
            "instead of arriving while the next forward goes on."
        )


class _BeforeForward:
    """The hook on each module. In a copy of the module, or a pickled module, it does nothing."""

    def __init__(self, reads: ParameterReads | None = None) -> None:
        self._reads = reads

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self._reads is not None:
            self._reads.before_forward(module)

    def __reduce__(self) -> Any:
        return _BeforeForward, ()


def _own_parameters(module: nn.Module) -> Iterator[Parameter]:
    compiled = getattr(module, "_orig_mod", None) is not None  # by torch.compile(module): hooks inside do not run
    return module.parameters(recurse=compiled)


class _Watch(TorchFunctionMode):
    def __init__(self, reads: ParameterReads) -> None:
        self._reads = reads
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.compiler.is_compiling() and func not in _READS_NO_VALUES:
            self._look_at(args)
            if kwargs:
                self._look_at(kwargs.values())
            if func in NORMS:
                self._reads.on_norm(args)
        return func(*args, **kwargs)

    def _look_at(self, values: Iterable[Any]) -> None:
        for value in values:
            kind = type(value)
            if kind is list or kind is tuple:
                self._look_at(value)
            elif kind is dict:
                self._look_at(value.values())
            else:
                self._reads.look_at(value)
