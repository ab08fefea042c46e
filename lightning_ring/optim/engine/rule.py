"""The maths of an optimizer, and the numbers that it needs for one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import send

Tensors = tuple[Tensor, ...] | list[Tensor]
States = list[Tensors]  # in the order of `Rule.state_names`
Scale = float | list[float] | list[Tensor]
# named numbers: vectors over parameters, or a `Scale` each
Scalars = SimpleNamespace


class Rule:
    """One step of a layer-wise optimizer over lists of tensors.

    `accumulate` brings the state up to date, and `direction` follows from it. The sums of squares
    of weights and direction (over ranks, if the parameter is cut) give the trust ratio; then `move`
    changes the weights. `kernels.py` has the same for GPUs.

    Methods that take ``h`` find their numbers in it: a float where it is the same for all tensors,
    else a list with one for each. `scalars`, `trust_ratio` and `rates` make these numbers, from
    float64 vectors over the parameters.
    """

    # keys of the per-parameter state, tensors like the parameter that begin as zeros
    state_names: tuple[str, ...]
    # `scalars` needs the steps that each parameter has taken (state key ``step``)
    counts_steps: bool
    # `direction` is more than the gradient: it pays to keep it from the norm to the move
    keeps_directions: bool
    # what the names of its kernels begin with
    kernels: str

    @staticmethod
    def scalars(h: Scalars) -> Scalars:
        """Further numbers of the other methods, from the groups' hyper-parameters, ``step`` (1 at
        the first one) and ``grad_scale`` (of sign and clipping).
        """
        raise NotImplementedError

    @staticmethod
    def trust_ratio(w_norm: Tensor, norm: Tensor, h: Scalars) -> Tensor:
        """Ratio where both norms are positive and the parameter adapts (elsewhere it is 1)."""
        raise NotImplementedError

    @staticmethod
    def rates(ratio: Tensor, h: Scalars) -> Scalars:
        """Further numbers for `move`, which depend on the trust ratio."""
        raise NotImplementedError

    @staticmethod
    def accumulate(g: Tensors, state: States, h: Scalars) -> None:
        """Bring the state that `direction` needs up to date, in place."""

    @staticmethod
    def direction(w: Tensors, g: Tensors, state: States, h: Scalars) -> Tensors:
        """The tensors whose norms the trust ratio compares with those of ``w``."""
        raise NotImplementedError

    @staticmethod
    def move(w: Tensors, g: Tensors, x: Tensors, state: States, h: Scalars) -> None:
        """Change weights and state in place; ``x`` is the `direction`."""
        raise NotImplementedError

    @staticmethod
    def torch_directions(w: Tensors, g: Tensors, state: States, h: Scalars) -> Tensors | None:
        """`accumulate` and `direction` by a fused kernel of torch for 1-D CPU tensors of one dtype;
        None, with nothing done, if none fits.
        """
        return None

    @staticmethod
    def torch_move(w: Tensors, g: Tensors, state: States, h: Scalars) -> bool:
        """`move` of one tensor, likewise, without its direction. False, with nothing done, if none
        fits.
        """
        return False


def add_(tensors: Tensors, others: Tensors, scale: Scale, sign: float = 1.0) -> None:
    """``tensors += sign * scale * others``; nothing is read where ``scale`` is 0."""
    if not isinstance(scale, float):
        torch._foreach_add_(tensors, torch._foreach_mul(others, scale), alpha=sign)
    elif scale != 0:
        torch._foreach_add_(tensors, others, alpha=sign * scale)


class StepNumbers:
    """The numbers of the parameters of one batch: hyper-parameters ``h``, `Rule.scalars`, and then
    the rates.

    Gradients are divided by ``clip`` unless it is None. Numbers that the CPU knows are floats here,
    and reach ``device`` in one copy.
    """

    def __init__(
        self,
        rule: type[Rule],
        h: Scalars,
        step: Tensor | None,
        clip: Tensor | None,
        device: torch.device,
    ) -> None:
        self._rule = rule
        place = h.lr.device
        if step is not None:
            h.step = send(step.double(), place)
        sign = 1 - 2 * h.maximize
        h.grad_scale = sign if clip is None else sign / clip
        scalars = vars(h) | vars(rule.scalars(h))
        self._lists = {name: _as_list(vector) for name, vector in scalars.items()}
        self._uniform = {
            name
            for name, values in self._lists.items()
            if isinstance(values[0], float) and values.count(values[0]) == len(values)
        }
        if place.type == "cpu" and device.type != "cpu":
            packed = torch.stack(list(scalars.values()))
            moved = send(packed.float() if device.type == "mps" else packed, device)
            scalars = dict(zip(scalars, moved.unbind(), strict=True))
        self._vectors = Scalars(**scalars)

    def over(self, rows: list[int], as_lists: bool) -> Scalars:
        """The numbers of the parameters ``rows``. With ``as_lists`` none of them is a float."""
        found: dict[str, Scale] = {}
        for name, values in self._lists.items():
            is_one = len(rows) == 1 or name in self._uniform
            if is_one and isinstance(values[0], float) and not as_lists:
                found[name] = values[rows[0]]
            else:
                found[name] = [values[row] for row in rows]
        return Scalars(**found)

    def add_rates(self, sums: Tensor) -> Tensor:
        """Take in the rates that follow from the sums of squares of weights and direction.
        Returns the trust ratios.
        """
        h = self._vectors
        w_norm, norm = sums[0].sqrt(), sums[1].sqrt()
        adapts = (w_norm > 0) & (norm > 0) & (h.adapt != 0)
        ratio = torch.where(adapts, self._rule.trust_ratio(w_norm, norm, h), 1.0)
        for name, vector in vars(self._rule.rates(ratio, h)).items():
            self._lists[name] = _as_list(vector)
        return ratio


def _as_list(vector: Tensor) -> list[Any]:
    return vector.tolist() if vector.device.type == "cpu" else list(vector.unbind())
