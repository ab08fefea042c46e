"""Lists of tensors with arithmetic that costs few sweeps over memory."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...] | list[Tensor]
Scale = float | list[float] | list[Tensor]


class TensorList:
    """``scale * a``, or ``scale * a * b``, elementwise over lists of tensors, computed lazily.

    Scaling and products wait for the addition that uses them: ``0.9 * v + 0.1 * g * g`` is two
    sweeps (``mul``, ``addcmul``), and terms with scale 0 cost nothing. Operands are never
    overwritten.
    """

    __slots__ = ("_a", "_b", "_scale")

    def __init__(self, a: Tensors, scale: Scale = 1.0, b: Tensors | None = None) -> None:
        self._a = a
        self._scale = scale
        self._b = b

    def tensors(self) -> Tensors:
        """The values: the operands themselves where nothing was computed."""
        product = self._a if self._b is None else torch._foreach_mul(self._a, self._b)
        return product if _is(self._scale, 1.0) else _scaled(product, self._scale)

    def __rmul__(self, number: Any) -> TensorList:
        return TensorList(self._a, _times(number, self._scale), self._b)

    def __mul__(self, other: TensorList) -> TensorList:
        assert self._b is None, "a TensorList multiplies two factors at most"
        assert other._b is None, "a TensorList multiplies two factors at most"
        return TensorList(self._a, _times(self._scale, other._scale), other._a)

    def __add__(self, other: Any) -> TensorList:
        return self._plus(other, 1.0)

    def __sub__(self, other: Any) -> TensorList:
        return self._plus(other, -1.0)

    def _plus(self, other: Any, sign: float) -> TensorList:
        if not isinstance(other, TensorList):
            return TensorList(torch._foreach_add(self.tensors(), _times(sign, other)))
        scale: Any = _times(sign, other._scale)
        if _is(scale, 0.0):
            return self
        if other._b is not None:
            a: Tensors = other._a
            if _on_device(scale):
                a, scale = _scaled(a, scale), 1.0
            return TensorList(torch._foreach_addcmul(self.tensors(), a, other._b, scale))
        if isinstance(scale, float):
            return TensorList(torch._foreach_add(self.tensors(), other._a, alpha=scale))
        return TensorList(torch._foreach_add(self.tensors(), _scaled(other._a, scale)))

    def __truediv__(self, other: TensorList) -> TensorList:
        return TensorList(torch._foreach_div(self.tensors(), other.tensors()))

    def sqrt(self) -> TensorList:
        return TensorList(torch._foreach_sqrt(self.tensors()))


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
