"""Search for code that reads parameters without a call of torch from Python: scripted, compiled,
`torch.func`.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterator
from itertools import pairwise
from types import CellType, CodeType, FunctionType
from typing import Any

import torch
from torch import nn

_TRANSFORMS = {  # of functions: inside them a parameter is wrapped
    name: getattr(torch.func, name)
    for name in (
        "grad",
        "grad_and_value",
        "vjp",
        "jvp",
        "jacrev",
        "jacfwd",
        "hessian",
        "linearize",
        "vmap",
    )
}
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_ring")


def find_unseen_reader(module: nn.Module) -> str | None:
    """Name of a scripted or compiled object, or a transform of `torch.func`, to which the steps of
    ``module`` may pass parameters; `None` if there is none.

    The search covers submodules, their attributes, and the globals and closures of the methods of
    the class of ``module``. It does not cover lists or dicts of functions, nor calls in other
    Python modules. A module returned by ``torch.compile(module)`` does not count: its forward
    pre-hook waits for its parameters.
    """
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            return path or type(child).__name__
        if getattr(child, "_orig_mod", None) is not None:  # by `torch.compile(module)`
            continue
        # by `module.compile()`, its hooks too
        if getattr(child, "_compiled_call_impl", None) is not None:
            return path or type(child).__name__
        for name, value in vars(child).items():
            if _is_unseen(value):
                return f"{path}.{name}" if path else name
    return next(
        (name for name, value in _named_by_methods(type(module)) if _is_unseen(value)), None
    )


def _is_unseen(value: Any) -> bool:
    if isinstance(value, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return True
    if any(value is transform for transform in _TRANSFORMS.values()):
        return True
    # by torch.compile(function)
    compiled = inspect.isroutine(value) and hasattr(value, "_torchdynamo_orig_callable")
    return compiled and not getattr(value, "_torchdynamo_disable", False)


def _named_by_methods(kind: type) -> Iterator[tuple[str, Any]]:
    for owner in kind.__mro__:
        if owner is object or owner.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, value in vars(owner).items():
            yield name, value
            function = (
                inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
            )
            if isinstance(function, FunctionType):
                yield from _named_by(function)


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        # lambdas within
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (
            (name, function.__globals__[name])
            for name in code.co_names
            if name in function.__globals__
        )
        loaded = [
            one.argval for one in dis.get_instructions(code) if one.opname.startswith("LOAD_")
        ]
        for owner, name in pairwise(loaded):  # `torch.func.grad`, `torch.vmap`
            found = function.__globals__.get(owner) if isinstance(owner, str) else None
            if name in _TRANSFORMS and (owner == "func" or found is torch or found is torch.func):
                yield f"torch.func.{name}", _TRANSFORMS[name]
