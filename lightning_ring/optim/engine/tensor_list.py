"""Lists of tensors with arithmetic that costs as few sweeps over memory as hand-written in-place code."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...] | list[Tensor]
Scale = float | list[float] | list[Tensor]


class _Memory:
    """Tensors that one expression may or may not overwrite."""

    __slots__ = ("given", "live", "temporary", "tensors")

    def __init__(self, tensors: Tensors, *, given: bool = False, temporary: bool = False) -> None:
        self.tensors = tuple(tensors)
        self.given = given or temporary
        self.temporary = temporary
        self.live = True

    def taken(self) -> tuple[Tensor, ...]:
        """The tensors, to be overwritten: the old values are gone."""
        tensors, self.live = self.read(), False
        return tensors

    def read(self) -> tuple[Tensor, ...]:
        assert self.live, "a rule used the left operand of an operator again after the operator overwrote it"
        return self.tensors


class TensorList:
    """``scale * a``, or ``scale * a * b``, elementwise over lists of tensors, computed lazily.

    An operator overwrites its left operand if that is a temporary; ``+`` and ``-`` also if it is an argument that the
    caller gave away. Using it again is an assertion error. The right operand is never overwritten. Scaling and products
    wait for the addition that uses them: ``0.9 * v + 0.1 * g * g`` is two sweeps (``mul_``, ``addcmul_``), and terms
    with scale 0 cost nothing.
    """

    __slots__ = ("_a", "_b", "_scale")

    def __init__(self, memory: _Memory, scale: Scale = 1.0, factor: _Memory | None = None) -> None:
        self._a = memory
        self._scale = scale
        self._b = factor

    @staticmethod
    def of(tensors: Tensors, *, given: bool = False) -> TensorList:
        """``tensors`` as they are; ``given``: a sum that begins with them may be formed in their memory."""
        return TensorList(_Memory(tensors, given=given))

    def tensors(self) -> tuple[Tensor, ...]:
        """The values. Not to be written to unless they are a temporary's."""
        if self._b is None and _is(self._scale, 1.0):
            return self._a.read()
        return self._written()

    def _written(self) -> tuple[Tensor, ...]:
        """The values in memory that may be overwritten."""
        if self._b is not None:
            out = torch._foreach_mul(self._a.read(), self._b.read())
            _scale_(out, self._scale)
            return tuple(out)
        if self._a.given:
            out = self._a.taken()
            _scale_(out, self._scale)
            return out
        return tuple(_scaled(self._a.read(), self._scale))

    def __rmul__(self, number: Any) -> TensorList:
        return TensorList(self._a, _times(number, self._scale), self._b)

    def __mul__(self, other: Any) -> TensorList:
        if not isinstance(other, TensorList):
            return other * self
        assert self._b is None, "a TensorList multiplies two factors at most"
        assert other._b is None, "a TensorList multiplies two factors at most"
        return TensorList(self._a, _times(self._scale, other._scale), other._a)

    def __add__(self, other: Any) -> TensorList:
        return self._plus(other, 1.0)

    def __sub__(self, other: Any) -> TensorList:
        return self._plus(other, -1.0)

    def _plus(self, other: Any, sign: float) -> TensorList:
        if not isinstance(other, TensorList):
            out = self._written()
            torch._foreach_add_(out, _times(sign, other))
            return _temporary(out)
        scale: Any = _times(sign, other._scale)
        if _is(scale, 0.0):
            return self
        untouched = self._b is None and _is(self._scale, 1.0) and not self._a.given
        if other._b is not None:
            b: Tensors = other._a.read()
            c = other._b.read()
            if _on_device(scale):
                b, scale = _scaled(b, scale), 1.0
            if untouched:
                return _temporary(torch._foreach_addcmul(self._a.read(), b, c, scale))
            out = self._written()
            torch._foreach_addcmul_(out, b, c, scale)
        elif untouched:
            return _temporary(_add(self._a.read(), other._a.read(), scale))
        else:
            out = self._written()
            if isinstance(scale, float):
                torch._foreach_add_(out, other._a.read(), alpha=scale)
            else:
                torch._foreach_add_(out, _scaled(other._a.read(), scale))
        return _temporary(out)

    def __truediv__(self, other: TensorList) -> TensorList:
        if self._b is None and not self._a.temporary:
            quotient = torch._foreach_div(self._a.read(), other.tensors())
            return TensorList(_Memory(quotient, temporary=True), self._scale)
        out = self._written()
        torch._foreach_div_(out, other.tensors())
        return _temporary(out)

    def sqrt(self) -> TensorList:
        if self._b is None and _is(self._scale, 1.0) and not self._a.temporary:
            return _temporary(torch._foreach_sqrt(self._a.read()))
        out = _scaled(self._a.read(), self._scale) if self._b is None and not self._a.temporary else self._written()
        torch._foreach_sqrt_(out)
        return _temporary(out)


def _temporary(tensors: Tensors) -> TensorList:
    return TensorList(_Memory(tensors, temporary=True))


def _is(scale: Scale, number: float) -> bool:
    return isinstance(scale, float) and scale == number


def _on_device(scale: Scale) -> TypeGuard[list[Tensor]]:
    return isinstance(scale, list) and isinstance(scale[0], Tensor)


def _times(a: Scale, b: Scale) -> Scale:
    if isinstance(a, list):
        factors: list[Any] = b if isinstance(b, list) else [b] * len(a)
        return [x * y for x, y in zip(a, factors, strict=True)]
    if isinstance(b, list):
        return [a * y for y in b]  # type: ignore[return-value]
    return a * b


def _scaled(tensors: Tensors, scale: Scale) -> Tensors:
    if _on_device(scale):
        return [tensor * s.to(tensor.dtype) for tensor, s in zip(tensors, scale, strict=True)]
    return torch._foreach_mul(tensors, scale)


def _scale_(tensors: Tensors, scale: Scale) -> None:
    if _on_device(scale):
        for tensor, s in zip(tensors, scale, strict=True):
            tensor.mul_(s)
    elif not _is(scale, 1.0):
        torch._foreach_mul_(tensors, scale)


def _add(a: Tensors, b: Tensors, scale: Scale) -> Tensors:
    if isinstance(scale, float):
        return torch._foreach_add(a, b, alpha=scale)
    out = _scaled(b, scale)
    torch._foreach_add_(out, a)
    return out
