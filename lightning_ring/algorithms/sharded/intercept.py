"""Parameters that call a function before code reads their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_DESCRIBES = (
    "shape",
    "grad",
    "requires_grad",
    "device",
    "dtype",
    "is_leaf",
    "grad_fn",
    "ndim",
    "layout",
    "is_sparse",
)
_DESCRIPTORS = [
    vars(torch._C.TensorBase)[name] if name in vars(torch._C.TensorBase) else getattr(Tensor, name)
    for name in _DESCRIBES
]
_READS_NO_VALUES = {
    *(
        accessor
        for descriptor in _DESCRIPTORS
        for accessor in (descriptor.__get__, descriptor.__set__)
    ),
    *(
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.stride,
        Tensor.is_floating_point,
        Tensor.__len__,
        Tensor.__hash__,
    ),
    *(Tensor.requires_grad_, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
}


def intercepting_class(before_read: Callable[[Parameter], None]) -> type[Parameter]:
    """A class that a parameter may take for a while (``param.__class__ = ...``, as torch's lazy
    parameters do).

    Any call of torch, copy or pickle that reads the parameter first calls ``before_read(param)``,
    which gives the parameter its own class again, or leaves a read that is an error to fail. Calls
    with other tensors cost nothing. Not intercepted: scripted and compiled code, C++, and
    `torch.func.grad` and the like, which wrap a parameter without a call of torch.
    """

    class InterceptedParameter(Parameter):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            intercepted = reads_values(func) and [
                *of_class(cls, args),
                *of_class(cls, kwargs.values()),
            ]
            for param in intercepted or ():
                before_read(param)
            if intercepted and all(type(param) is not cls for param in intercepted):
                return func(*args, **kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)

        def __deepcopy__(self, memo: Any) -> Any:
            before_read(self)
            copy = Parameter.__deepcopy__(self, memo)
            copy.__class__ = Parameter  # where the copied one keeps its class, as in another thread
            return copy

        def __reduce_ex__(self, protocol: Any) -> Any:
            before_read(self)
            return Parameter.__reduce_ex__(self, protocol)

    return InterceptedParameter


def reads_values(func: Any) -> bool:
    """Whether a call of torch may do more than describe its arguments."""
    return func not in _READS_NO_VALUES


def of_class(cls: type, values: Iterable[Any]) -> Iterator[Any]:
    """Those of ``values``, also in lists, tuples and dicts, whose class is ``cls``."""
    for value in values:
        if type(value) is cls:
            yield value
        elif isinstance(value, (list, tuple)):
            yield from of_class(cls, value)
        elif isinstance(value, dict):
            yield from of_class(cls, value.values())
