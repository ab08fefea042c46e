"""What an optimizer says about its maths, once, for every way to run it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

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
