"""LARS: layer-wise adaptive rate scaling."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_ring.optim.engine.options import RunOptions, require, require_number
from lightning_ring.optim.engine.rule import Scalars, States, Tensors, add_
from lightning_ring.optim.engine.trust_ratio import TrustRatioOptimizer


class LARS(TrustRatioOptimizer):
    """SGD with momentum whose step is, for each layer, proportional to the norm of its weights.

        r = trust_coefficient * ‖w‖ / (‖g‖ + weight_decay * ‖w‖ + eps)
        v = momentum * v + lr * r * (g + weight_decay * w)
        w = w - v

    for the weights w and the gradient g of a layer. r = 1 where either norm is 0 and where
    ``adapt`` is False; weight decay stays. This is Algorithm 1 of You, Gitman, Ginsburg, "Large
    Batch Training of Convolutional Networks" (2017, arXiv:1708.03888).

    Args:
        params: Parameters, named parameters or groups. A group may set any of the arguments down to
            ``adapt``; `exclude_bias_and_norm` builds the usual two.
        lr: Learning rate, a float >= 0 or a 0-d tensor.
        momentum: In [0, 1).
        nesterov: Step along ``momentum * v + lr * r * (g + wd * w)`` instead of ``v``; needs
            momentum > 0.
        weight_decay: At least 0; part of the gradient that meets the trust ratio, as in the paper.
        trust_coefficient: Above 0; the paper's 0.001.
        eps: At least 0, added to the ratio's denominator.
        momentum_form: ``"paper"`` keeps the learning rate inside ``v`` (above). ``"torch"`` keeps
            it outside, as `torch.optim.SGD` does: ``v = momentum * v + r * (g + wd * w); w -= lr *
            v``. They agree while ``lr`` is constant; while it changes, ``"torch"`` takes the steps
            that Goyal et al. 2017 ask of momentum correction (arXiv:1706.02677, remark 3).
        maximize: Step up the gradient instead of down.
        adapt: False for plain SGD: no trust ratio.
        foreach, fused, capturable, skip_nonfinite, master_weights: See `TrustRatioOptimizer`.

    Raises:
        ValueError: A hyper-parameter out of range, a group with an unknown key, no parameters.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = LARS(exclude_bias_and_norm(model, weight_decay=1e-4), lr=0.1, momentum=0.9)
    """

    state_names = ("momentum_buffer",)
    counts_steps = False
    keeps_directions = False
    kernels = "lars"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        momentum_form: Literal["paper", "torch"] = "paper",
        maximize: bool = False,
        adapt: bool = True,
        *,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        skip_nonfinite: bool = False,
        master_weights: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "momentum_form": momentum_form,
            "maximize": maximize,
            "adapt": adapt,
        }
        options = RunOptions(foreach, fused, capturable, skip_nonfinite, master_weights)
        super().__init__(params, defaults, options)

    @staticmethod
    def check_group(group: dict[str, Any]) -> None:
        require_number("momentum", group["momentum"], below=1)
        require_number("trust_coefficient", group["trust_coefficient"], positive=True)
        form = group["momentum_form"]
        require(form in ("paper", "torch"), f"momentum_form={form!r}, expected 'paper' or 'torch'")
        require(
            not group["nesterov"] or group["momentum"] > 0,
            "nesterov=True with momentum=0: Nesterov's step needs a momentum above 0",
        )

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        found = super().hyperparameters(group)
        found["lr_inside"] = found.pop("momentum_form") == "paper"
        return found

    @staticmethod
    def scalars(h: Scalars) -> Scalars:
        inside = h.lr_inside != 0
        outer = torch.where(inside, 1.0, h.lr)
        return Scalars(
            inner=torch.where(inside, h.lr, 1.0),
            ahead=torch.where(h.nesterov != 0, outer * h.momentum, outer),
            straight=torch.where(h.nesterov != 0, outer, 0.0),
        )

    @staticmethod
    def trust_ratio(w_norm: Tensor, norm: Tensor, h: Scalars) -> Tensor:
        return h.trust_coefficient * w_norm / (norm + h.weight_decay * w_norm + h.eps)

    @staticmethod
    def rates(ratio: Tensor, h: Scalars) -> Scalars:
        gain = h.inner * ratio
        return Scalars(gain=gain, beside=h.straight * gain)

    @staticmethod
    def direction(w: Tensors, g: Tensors, state: States, h: Scalars) -> Tensors:
        # only its norms are looked at
        is_one = isinstance(h.grad_scale, float) and abs(h.grad_scale) == 1
        return g if is_one else torch._foreach_mul(g, h.grad_scale)

    @staticmethod
    def move(w: Tensors, g: Tensors, x: Tensors, state: States, h: Scalars) -> None:
        (v,) = state
        decayed = torch._foreach_mul(g, h.grad_scale)
        add_(decayed, w, h.weight_decay)
        torch._foreach_mul_(v, h.momentum)
        add_(v, decayed, h.gain)
        add_(w, v, h.ahead, sign=-1)
        add_(w, decayed, h.beside, sign=-1)

    @staticmethod
    def torch_move(w: Tensors, g: Tensors, state: States, h: Scalars) -> bool:
        # SGD's v = momentum * v + (1 - dampening) * (g + wd * w), w -= lr * v, with gain for 1 -
        # dampening, as far as 1 - (1 - gain) is gain to the precision of the weights.
        smallest = 1e-2 if w[0].dtype == torch.float64 else 1e-7
        if h.beside != 0 or h.momentum == 0 or abs(h.grad_scale) != 1 or not h.gain > smallest:
            return False
        torch._fused_sgd_(
            w,
            g,
            state[0],
            weight_decay=h.weight_decay,
            momentum=h.momentum,
            lr=h.ahead,
            dampening=1 - h.gain,
            nesterov=False,
            maximize=h.grad_scale < 0,
            is_first_step=False,
        )
        return True
