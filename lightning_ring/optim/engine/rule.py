"""The maths of an optimizer, written once for every runner, and the scalars of one step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightning_ring.host.accelerator import send
from lightning_ring.optim.engine.tensor_list import Tensors

Operand = Any  # a Tensor, a TensorList or a Symbol: each has + - * / and .sqrt()
# named numbers of one parameter: floats, vectors over parameters, or Symbols
Scalars = SimpleNamespace


class Rule:
    """One step of a layer-wise optimizer, as expressions without side effects.

    ``accumulate``, `direction` and `move` are elementwise and use only ``+ - * /`` and ``.sqrt()``:
    the same lines run on a `Tensor` (plain), on a `TensorList` (multi-tensor), and on a `Symbol`,
    which writes the body of a Triton kernel. A step is: ``state = accumulate(...)``, ``x =
    direction(...)``; the sums of squares of ``w`` and ``x`` (over ranks, if the parameter is cut)
    give the trust ratio; then `move`.

    `scalars`, `trust_ratio` and `rates` are arithmetic too, with comparisons, ``**`` (of a base >=
    0), `torch.where` and `torch.minimum`: they run on vectors, and as Triton on one row each.
    """

    # keys of the per-parameter state, tensors like the parameter that begin as zeros
    state_names: tuple[str, ...]
    # `scalars` needs the steps that each parameter has taken (state key ``step``)
    counts_steps: bool
    # `direction` is more than the gradient: it pays to keep it from the norm to the move
    keeps_directions: bool

    @staticmethod
    def scalars(h: Scalars, step: Tensor | None, grad_scale: Tensor) -> Scalars:
        """The numbers of the expressions below, from the groups' hyper-parameters.

        Arguments and results are float64 vectors over the parameters. ``step`` is 1 at the first
        step; ``grad_scale`` holds sign and clipping.
        """
        raise NotImplementedError

    @staticmethod
    def accumulate(
        w: Operand, g: Operand, state: tuple[Operand, ...], h: Scalars
    ) -> tuple[Operand, ...]:
        """The state that `direction` needs."""
        raise NotImplementedError

    @staticmethod
    def direction(w: Operand, g: Operand, state: tuple[Operand, ...], h: Scalars) -> Operand:
        """The tensor whose norm the trust ratio compares with that of ``w``."""
        raise NotImplementedError

    @staticmethod
    def trust_ratio(w_norm: Tensor, norm: Tensor, h: Scalars) -> Tensor:
        """Ratio where both norms are positive and the parameter adapts (elsewhere it is 1);
        vectors over parameters.
        """
        raise NotImplementedError

    @staticmethod
    def rates(ratio: Tensor, h: Scalars) -> Scalars:
        """Further numbers for `move`, which depend on the trust ratio; vectors over parameters."""
        raise NotImplementedError

    @staticmethod
    def move(
        w: Operand, g: Operand, x: Operand, state: tuple[Operand, ...], h: Scalars
    ) -> tuple[Operand, tuple[Operand, ...]]:
        """New weights and state; ``x`` is the `direction`, ``h`` holds `scalars` and `rates`."""
        raise NotImplementedError

    @staticmethod
    def torch_directions(
        w: Tensors, g: Tensors, state: tuple[Tensors, ...], h: Scalars
    ) -> Tensors | None:
        """`accumulate` in place and `direction`, by a fused kernel of torch for 1-D CPU tensors of
        one dtype.

        Numbers in ``h`` are lists where they differ between the tensors. None, with nothing done,
        if no kernel fits.
        """
        return None

    @staticmethod
    def torch_move(
        w: Tensor, g: Tensor, x: Tensor | None, state: tuple[Tensor, ...], h: Scalars
    ) -> bool:
        """`move` of one tensor in place, likewise; ``x`` if it was kept. False, with nothing
        done, if none fits.
        """
        return False


def step_scalars(rule: type[Rule], h: Scalars, step: Any, clip: Any) -> Scalars:
    """`Rule.scalars` and ``adapt``; gradients are divided by ``clip`` unless it is None."""
    grad_scale = 1 - 2 * h.maximize
    if clip is not None:
        grad_scale = grad_scale / clip
    scalars = rule.scalars(h, step, grad_scale)
    scalars.adapt = h.adapt
    return scalars


def ratio_and_rates(rule: type[Rule], sums: Any, h: Scalars) -> tuple[Any, Scalars]:
    """The trust ratio that follows from the sums of squares of weights and direction, and
    `Rule.rates`.
    """
    w_norm, norm = sums[0].sqrt(), sums[1].sqrt()
    adapts = (w_norm > 0) & (norm > 0) & (h.adapt != 0)
    ratio = torch.where(adapts, rule.trust_ratio(w_norm, norm, h), 1.0)
    return ratio, rule.rates(ratio, h)


class StepNumbers:
    """Named vectors over all parameters, on the device and, as far as the CPU knows them, on the
    host.

    ``base`` holds the numbers that these extend.
    """

    def __init__(
        self,
        on_device: dict[str, Tensor],
        on_host: dict[str, Tensor],
        base: StepNumbers | None = None,
    ) -> None:
        self.on_device = on_device
        self._on_host = on_host
        self._base = base
        self._lists: dict[str, list[float] | list[Tensor]] = (
            {} if base is None else dict(base._lists)
        )
        self._uniform: dict[str, float] | None = None
        self._at: dict[int, Scalars] = {}

    def values(self, name: str) -> list[float] | list[Tensor]:
        """One float for each parameter, or one 0-d tensor where the value is known on the device
        only.
        """
        if name not in self._lists:
            host = self._on_host.get(name)
            self._lists[name] = (
                list(self.on_device[name].unbind()) if host is None else host.tolist()
            )
        return self._lists[name]

    def at(self, position: int) -> Scalars:
        """The scalars of the parameter at ``position``."""
        if position not in self._at:
            known = {} if self._base is None else vars(self._base.at(position))
            further = {
                name: self.values(name)[position] for name in self.on_device if name not in known
            }
            self._at[position] = Scalars(**known, **further)
        return self._at[position]

    def over(self, positions: list[int]) -> Scalars:
        """The scalars of several parameters: a float where it is the same for all parameters,
        else a list.
        """
        if len(positions) == 1:
            first = self.at(positions[0])
            if self._on_host.keys() == self.on_device.keys():
                return first
            return Scalars(
                **{name: v if isinstance(v, float) else [v] for name, v in vars(first).items()}
            )
        same = self._same_everywhere()
        return Scalars(
            **{
                name: same[name]
                if name in same
                else [self.values(name)[position] for position in positions]
                for name in self.on_device
            }
        )

    def _same_everywhere(self) -> dict[str, float]:
        """The scalars that are known on the host and the same for all parameters."""
        if self._base is not None:
            return self._base._same_everywhere()
        if self._uniform is None:
            lists = {name: list[Any](self.values(name)) for name in self._on_host}
            self._uniform = {name: v[0] for name, v in lists.items() if v.count(v[0]) == len(v)}
        return self._uniform

    def after(self, rule: type[Rule], sums: Tensor) -> tuple[Tensor, StepNumbers]:
        """The trust ratios that follow from ``sums``, and these numbers with the rates."""
        ratio, rates = ratio_and_rates(rule, sums, Scalars(**self.on_device))
        return ratio, self._extended(rates)

    def table(self, names: tuple[str, ...]) -> Tensor:
        """The numbers of these names, shape [parameters, names]; of rates anything before they
        are known.
        """
        known = self.on_device
        return torch.stack([known.get(name, known["adapt"]) for name in names], dim=1)

    def _extended(self, further: Scalars) -> StepNumbers:
        """These vectors and ``further`` vectors on the device."""
        on_host = dict(self._on_host)
        if all(v.device.type == "cpu" for v in vars(further).values()):
            on_host.update(vars(further))
        return StepNumbers({**self.on_device, **vars(further)}, on_host, self)


def known_on_host(h: Scalars, device: torch.device) -> StepNumbers:
    """Numbers that the CPU knows, brought to ``device`` in one copy."""
    host = vars(h)
    if device.type == "cpu":
        return StepNumbers(host, host)
    packed = torch.stack(list(host.values()))
    moved = send(packed.float() if device.type == "mps" else packed, device)
    return StepNumbers(dict(zip(host, moved.unbind(), strict=True)), host)
