"""Reads of parameters whose new values are still arriving: each module waits for those it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from lightning_ring.algorithms.hooks import UncopiedHook
from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.gradients.memory import current_stream


class ParameterReads:
    """Forward pre-hooks that wait for the parameters which a module is about to read.

    After a step parameters cannot be read until their bucket has arrived (`ParameterBucket.hide`).
    A module's hook waits for the module's own parameters. If a parameter gets its first gradient
    and its module was never called, other code reads it: the innermost module around it that was
    called then waits for it too (`nn.MultiheadAttention` reads its projection's weight), or the
    whole module, before each forward (compiled code). ``state_dict()`` and ``load_state_dict()``
    wait for all parameters. Any other read is an error (`memory.unreadable_like`).

    A bucket arrives on the stream of a GPU that waits for it. If modules run on several streams,
    ``trusted`` becomes False, and each step waits for all parameters.
    """

    def __init__(
        self, parameters: ShardedParameters, module: nn.Module, warn: Callable[[str], None]
    ) -> None:
        self.trusted = True
        self._parameters = parameters
        self._module = module
        self._warn = warn
        # By id: a metric of torchmetrics, which is a module, changes its hash with its state.
        self._read_by: dict[int, list[Parameter]] = {}
        self._called: set[int] = set()
        self._hooked: list[nn.Module] = []  # keeps ids from being used again
        self._known: set[int] = set()  # ids of parameters that have had a gradient
        self._stream: Any = None  # of this forward
        self._told = False
        self._handles: list[Any] = []
        parameters.reducer.on_gradient = self._on_gradient
        self.follow()

    def follow(self) -> None:
        """Put hooks on modules that are new. A module keeps the parameters that it waits for."""
        owners: Counter[int] = Counter()
        for module in self._module.modules():
            # a scripted module's forward reads what is in it, and Python does not see it
            if module is not self._module and isinstance(module, torch.jit.ScriptModule):
                continue
            if id(module) not in self._read_by:
                self._hook(module)
            owners.update(id(param) for param in module.parameters(recurse=False))
            # The code of ``torch.compile(module)`` reads what is in the module.
            compiled = getattr(module, "_orig_mod", None) is not None
            self._add(module, module.parameters(recurse=compiled))
        # Code may read a tied parameter before it calls a module that holds it.
        tied = [param for param in self._module.parameters() if owners[id(param)] > 1]
        self._add(self._module, tied)

    def _add(self, module: nn.Module, params: Iterable[Parameter]) -> None:
        own = self._read_by.setdefault(id(module), [])
        known = {id(param) for param in own}
        own += [param for param in params if id(param) not in known]

    def _hook(self, module: nn.Module) -> None:
        self._hooked.append(module)
        if not isinstance(module, torch.jit.ScriptModule):  # which allows none
            self._handles += [
                module.register_forward_pre_hook(UncopiedHook(self._before), prepend=True),
                module.register_state_dict_pre_hook(UncopiedHook(self._wait_for_all)),
                module.register_load_state_dict_pre_hook(UncopiedHook(self._wait_for_all)),
            ]

    def begin_forward(self) -> None:
        """The whole module is about to compute a loss, whether it is called or a method of it."""
        if self._parameters.reducer.buckets:
            self._stream = current_stream(self._parameters.device)
        self._before(self._module)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._parameters.reducer.on_gradient = None

    def _before(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # compiled code would not contain this
            return
        self._called.add(id(module))
        for param in () if self._parameters.complete else self._read_by[id(module)]:
            self._parameters.wait_for(param)
        if (
            self._stream is not None
            and self.trusted
            and current_stream(self._parameters.device) != self._stream
        ):
            self.trusted = False
            self._warn(
                f"modules run on several streams of {self._parameters.device}. All parameters are "
                "waited for after each step, instead of arriving while the next forward goes on."
            )

    def _wait_for_all(self, *_: Any) -> None:
        if self._parameters.hidden:
            self._parameters.wait()

    def _on_gradient(self, param: Parameter) -> None:
        if id(param) in self._known:
            return
        self._known.add(id(param))
        # a copy: backward has threads of its own, and a module may be called in another meanwhile
        if any(one is param for module in list(self._called) for one in self._read_by[module]):
            return
        name = next((name for name, one in self._module.named_parameters() if one is param), "")
        reader = inner = self._module
        for part in name.split(".")[:-1]:
            inner = getattr(inner, part)
            if id(inner) in self._called:
                reader = inner
        self._read_by[id(reader)].append(param)
        if reader is self._module and not self._told:
            self._told = True
            self._warn(
                f"{name or 'a parameter'} gets gradients, but lightning_ring does not see which "
                "module reads it (compiled code, or a method that is not the module's forward). "
                "Each forward waits first for such parameters."
            )
