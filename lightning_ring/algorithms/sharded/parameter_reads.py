"""Find out whether all reads of parameters can be intercepted, before any parameter is on its
way during a forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from lightning_ring.algorithms.sharded.compiled_code import find_unseen_reader
from lightning_ring.algorithms.sharded.intercept import intercepting_class, of_class, reads_values
from lightning_ring.algorithms.sharded.parameters import ShardedParameters
from lightning_ring.algorithms.uncopied_hook import UncopiedHook
from lightning_ring.gradients.memory import current_stream

_WAITS = (
    "All parameters are waited for after each step, instead of arriving while the next forward "
    "goes on."
)


class ParameterReads:
    """Tells after a step whether its parameters may be on their way during the next forward.

    They may if all reads are intercepted (`intercepting_class`), each of which waits for its
    bucket. Other reads would be errors (`ParameterBucket.hide`). The first forward, in which all
    parameters are complete, shows it: parameters note that they are read, and one that gets a
    gradient unread was read by scripted or compiled code. The same happens in the forward after the
    first gradient of a parameter. `torch.func` wraps parameters without a call of torch; a
    `TorchFunctionMode` finds such wrappers in the same forward. If there is a read of these kinds,
    or `find_unseen_reader` finds code that may contain one, ``trusted`` becomes False and each step
    waits for all parameters. So it does where several streams of a GPU read parameters: a bucket
    arrives on the one that reads first.
    """

    def __init__(
        self, parameters: ShardedParameters, module: nn.Module, warn: Callable[[str], None]
    ) -> None:
        self.trusted = True
        self._parameters = parameters
        self._module = module
        self._warn = warn
        # ids of parameters whose reads are known to be intercepted
        self._verified: set[int] = set()
        self._seen: set[int] = set()  # read in this forward
        self._verifies = False  # the gradients that come are those of a forward that noted reads
        self._verify_next = True
        self._in_forward = False
        self._addresses: set[int] = set()  # of the parameters, in that forward
        self._mode = _Watch(self)
        self._stream: Any = None  # current when that forward began
        self._thread = threading.get_ident()
        self._noting = intercepting_class(self._note)
        self._hooks: dict[nn.Module, Any] = {}
        parameters.reducer.on_gradient = self._on_gradient
        self.follow()
        if unseen := find_unseen_reader(module):
            self._distrust(
                f"{unseen} (scripted, compiled, or a transform of torch.func) may read parameters "
                "where lightning_ring cannot see it."
            )

    def follow(self) -> None:
        """Wait before new modules of ``torch.compile(module)``: compiled code reads without a
        call of torch.
        """
        for module in self._module.modules():
            if module not in self._hooks and getattr(module, "_orig_mod", None) is not None:
                hook = UncopiedHook(self._before_compiled)
                self._hooks[module] = module.register_forward_pre_hook(hook, prepend=True)

    @property
    def may_overlap(self) -> bool:
        """Whether parameters may be on their way when a step returns."""
        return self.trusted and not self._verify_next and not (self._verifies and self._in_forward)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a training step."""
        self._seen.clear()
        self._verifies, self._verify_next = self.trusted and self._verify_next, False
        if not self._verifies:
            yield
            return
        params = [param for param in self._module.parameters() if id(param) not in self._verified]
        # by `functional_call`
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, params)):
            self._distrust("torch.func transforms a function of parameters.")
            self._verifies = False
            yield
            return
        # others never travel during a forward
        noting = [param for param in params if type(param) is Parameter]
        self._verified.update(id(param) for param in params if type(param) is not Parameter)
        self._addresses = {param.data_ptr() for param in params if param.numel()}
        self._stream = current_stream(params[0].device) if params else None
        self._set_class(noting, self._noting)
        self._in_forward = True
        try:
            # code that `torch.compile` makes inside a mode would be made again without it
            with nullcontext() if self._hooks else self._mode:
                yield
        finally:
            self._in_forward = False
            self._set_class([param for param in noting if type(param) is self._noting], Parameter)

    def remove(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks.clear()
        self._parameters.reducer.on_gradient = None

    def _before_compiled(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():  # compiled code would not contain this
            for param in module.parameters():
                self._note(param)
                self._parameters.wait_for(param)

    def look_for_wrapped(self, values: Iterable[Any]) -> None:
        """Stop trusting where ``values``, arguments of a call of torch, contain a parameter
        wrapped by `torch.func`.
        """
        if (
            self._in_forward
            and self.trusted
            and any(_unwrapped_address(value) in self._addresses for value in values)
        ):
            self._distrust("torch.func transforms a function of parameters.")

    def look_for_unread(self, func: Any, values: Iterable[Any]) -> None:
        """After a call of torch with ``values``: a parameter among them that noted no read is
        read in another way.
        """
        if self._in_forward and self.trusted and reads_values(func):
            for _ in of_class(self._noting, values):
                self._distrust(
                    f"{getattr(func, '__name__', func)} was called with a parameter, whose read "
                    "was not seen."
                )
                return

    def _distrust(self, why: str) -> None:
        self.trusted = False
        self._warn(f"{why} {_WAITS}")

    def _note(self, param: Parameter) -> None:
        # of compiled code only what the compiler traces would be seen
        if not torch.compiler.is_compiling() and threading.get_ident() == self._thread:
            self._seen.add(id(param))
            if type(param) is self._noting:
                self._set_class([param], Parameter)
                if self.trusted and current_stream(param.device) != self._stream:
                    self._distrust(f"Parameters are read on several streams of {param.device}.")

    @staticmethod
    def _set_class(params: Iterable[Parameter], kind: type[Parameter]) -> None:
        for param in params:
            param.__class__ = kind

    def _on_gradient(self, param: Parameter) -> None:
        if id(param) in self._verified or not self.trusted:
            return
        if not self._verifies:
            self._verify_next = True
        elif id(param) in self._seen:
            self._verified.add(id(param))
        else:
            name = next(
                (name for name, other in self._module.named_parameters() if other is param),
                "a parameter",
            )
            self._distrust(
                f"{name} got a gradient, but no call of torch from Python was seen reading it "
                "(scripted or compiled code, or torch.func)."
            )


class _Watch(TorchFunctionMode):
    def __init__(self, reads: ParameterReads) -> None:
        self._reads = reads
        super().__init__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            self._reads.look_for_wrapped(args)
        result = func(*args, **(kwargs or {}))
        if not torch.compiler.is_compiling():
            self._reads.look_for_unread(func, args)
        return result


def _unwrapped_address(value: Any) -> int | None:
    """Address of the memory of a tensor that transforms of `torch.func` have wrapped; None of
    anything else.
    """
    if not isinstance(value, Tensor) or not is_functorch_wrapped_tensor(value):
        return None
    while is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return int(value.data_ptr())
