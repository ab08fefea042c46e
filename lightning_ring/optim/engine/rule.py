"""The maths of an optimizer, written once for every way to run it, and the scalars of one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_ring.optim.engine.tensor_list import Tensors

Operand = Any  # a Tensor, a TensorList or a Symbol: each has + - * / and .sqrt()
Scalars = SimpleNamespace  # named numbers of one parameter: floats, vectors over parameters, or Symbols


class Rule(Protocol):
    """One step of a layer-wise optimizer, as expressions without side effects.

    ``accumulate``, `direction` and `move` are elementwise and use only ``+ - * /`` and ``.sqrt()``, so that the same
    lines run on a `Tensor` (plain), on a `TensorList` (multi-tensor), and on a `Symbol`, which writes them down as the
    body of a C++ or Triton kernel. A step is: ``state = accumulate(...)``, ``x = direction(...)``; the sums of squares
    of ``w`` and ``x`` (over ranks, if the parameter is cut) give the trust ratio; then `move`. A `TensorList` works in
    the memory of its left operands: use no temporary again after it was one, nor ``w`` or state after ``+`` or ``-``.
    """

    state_names: tuple[str, ...]
    """Keys of the per-parameter state, each a tensor like the parameter that begins as zeros."""
    counts_steps: bool
    """Whether `scalars` needs the number of steps that each parameter has taken (state key ``step``)."""
    keeps_directions: bool
    """Whether `direction` is more than the gradient, so that it pays to keep it from one norm to the move."""

    def __hash__(self) -> int: ...

    @staticmethod
    def scalars(h: Scalars, step: Tensor | None, grad_scale: Tensor) -> Scalars:
        """The numbers the expressions below use, from the groups' hyper-parameters.

        Every attribute of ``h``, ``step`` (1 at the first step) and ``grad_scale`` is a float64 vector with one element
        for each parameter; so is every attribute of the result. ``grad_scale`` holds sign and clipping.
        """
        ...

    @staticmethod
    def accumulate(w: Operand, g: Operand, state: tuple[Operand, ...], h: Scalars) -> tuple[Operand, ...]:
        """The state that `direction` needs."""
        ...

    @staticmethod
    def direction(w: Operand, g: Operand, state: tuple[Operand, ...], h: Scalars) -> Operand:
        """The tensor whose norm is set against that of ``w``."""
        ...

    @staticmethod
    def trust_ratio(w_norm: Tensor, norm: Tensor, h: Scalars) -> Tensor:
        """Ratio where both norms are positive and the parameter adapts (elsewhere it is 1); vectors over parameters."""
        ...

    @staticmethod
    def rates(ratio: Tensor, h: Scalars) -> Scalars:
        """Further numbers for `move`, which depend on the trust ratio; vectors over parameters."""
        ...

    @staticmethod
    def move(
        w: Operand, g: Operand, x: Operand, state: tuple[Operand, ...], h: Scalars
    ) -> tuple[Operand, tuple[Operand, ...]]:
        """New weights and state; ``x`` is the `direction`, ``h`` holds `scalars` and `rates`."""
        ...

    @staticmethod
    def torch_directions(w: Tensors, g: Tensors, state: tuple[Tensors, ...], h: Scalars) -> Tensors | None:
        """`accumulate` in place and `direction`, by a fused kernel that torch has for 1-D CPU tensors of one dtype.

        Numbers in ``h`` are lists where they differ between the tensors. None, with nothing done, where no such kernel
        fits.
        """
        ...

    @staticmethod
    def torch_move(w: Tensor, g: Tensor, x: Tensor | None, state: tuple[Tensor, ...], h: Scalars) -> bool:
        """`move` of one tensor in place, likewise; ``x`` if it was kept. False, with nothing done, if none fits."""
        ...


class StepNumbers:
    """Named vectors over all parameters, on the device and, where that costs no synchronization, as floats.

    Args:
        on_device: The vectors, where the step's sums and ratios live.
        on_host: The same vectors on the CPU, as far as they are known there.
    """

    def __init__(self, on_device: dict[str, Tensor], on_host: dict[str, Tensor]) -> None:
        self.on_device = on_device
        self._on_host = on_host
        self._lists: dict[str, list[float] | list[Tensor]] = {}
        self._uniform: dict[str, float] | None = None
        self._at: dict[int, Scalars] = {}
        self._fewer: StepNumbers | None = None  # what these numbers extend
        self._all_on_host = on_host.keys() == on_device.keys()

    def values(self, name: str) -> list[float] | list[Tensor]:
        """One float for each parameter, or one 0-d tensor where the value is known on the device only."""
        if name not in self._lists:
            host = self._on_host.get(name)
            self._lists[name] = list(self.on_device[name].unbind()) if host is None else host.tolist()
        return self._lists[name]

    def at(self, position: int) -> Scalars:
        """The scalars of the parameter at ``position``."""
        found = self._at.get(position)
        if found is None:
            known = {} if self._fewer is None else vars(self._fewer.at(position))
            further = {name: self.values(name)[position] for name in self.on_device if name not in known}
            found = self._at[position] = Scalars(**known, **further)
        return found

    def over(self, positions: list[int]) -> Scalars:
        """The scalars of several parameters: a float where it is the same for all parameters, else a list."""
        if len(positions) == 1:
            first = self.at(positions[0])
            if self._all_on_host:
                return first
            return Scalars(**{name: v if isinstance(v, float) else [v] for name, v in vars(first).items()})
        scalars = Scalars()
        same = self._same_everywhere()
        for name in self.on_device:
            uniform = same.get(name)
            setattr(scalars, name, [self.values(name)[p] for p in positions] if uniform is None else uniform)
        return scalars

    def _same_everywhere(self) -> dict[str, float]:
        """The scalars that are known on the host and the same for all parameters."""
        if self._fewer is not None:
            return self._fewer._same_everywhere()
        if self._uniform is None:
            lists = {name: list[Any](self.values(name)) for name in self._on_host}
            self._uniform = {
                name: values[0] for name, values in lists.items() if values.count(values[0]) == len(values)
            }
        return self._uniform

    def extended(self, further: Scalars) -> StepNumbers:
        """These vectors and ``further`` ones, which live on the device."""
        numbers = StepNumbers({**self.on_device, **further.__dict__}, {})
        numbers._on_host = dict(self._on_host)
        numbers._lists = dict(self._lists)
        numbers._fewer = self
        if all(v.device.type == "cpu" for v in vars(further).values()) and not torch.compiler.is_compiling():
            numbers._on_host.update(vars(further))
            numbers._all_on_host = self._all_on_host
        return numbers


def known_on_host(h: Scalars, device: torch.device) -> StepNumbers:
    """Numbers that the CPU knows, brought to ``device`` in one copy."""
    host = vars(h)
    if device.type == "cpu":
        return StepNumbers(host, host)
    packed = torch.stack(list(host.values()))
    if device.type == "mps":
        packed = packed.float()
    elif device.type == "cuda":
        packed = packed.pin_memory()
    moved = packed.to(device, non_blocking=True)
    return StepNumbers(dict(zip(host, moved.unbind(), strict=True)), host)
