"""LAMB: Adam's direction with a layer-wise trust ratio."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from lightning_ring.optim.engine.options import RunOptions, require, require_number
from lightning_ring.optim.engine.rule import Scalars, States, Tensors, add_
from lightning_ring.optim.engine.trust_ratio import TrustRatioOptimizer

JUST_BELOW_1 = math.nextafter(1.0, 0.0)


class LAMB(TrustRatioOptimizer):
    """Adam whose step is, for each layer, proportional to the norm of its weights.

        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g²
        u = (m / (1 - beta1ᵗ)) / (√(v / (1 - beta2ᵗ)) + eps) + weight_decay * w
        w = w - lr * (‖w‖ / ‖u‖) * u

    for the weights w and the gradient g of a layer at step t. The ratio is 1 where either norm is 0
    and where ``adapt`` is False. This is Algorithm 2 of You et al., "Large Batch Optimization for
    Deep Learning" (2019, arXiv:1904.00962).

    Args:
        params: Parameters, named parameters or groups. A group may set any of the arguments down to
            ``adapt``; `exclude_bias_and_norm` builds the usual two.
        lr: Learning rate, a float >= 0 or a 0-d tensor.
        betas: Decay of the first and second moment, each in [0, 1).
        eps: At least 0, added to the root of the second moment.
        weight_decay: At least 0.
        bias_correction: False for the paper's version 3, which divides by no 1 - betaᵗ.
        trust_clip: Upper bound of the ratio, above 0; None for no bound.
        maximize: Step up the gradient instead of down.
        adapt: False for Adam with decoupled weight decay: no trust ratio.
        max_grad_norm: Divide all gradients by ``max(norm / max_grad_norm, 1)``, where ``norm`` is
            the norm over all groups together (NVIDIA's LAMB); None for no clipping. The gradients
            themselves are not changed.
        foreach, fused, capturable, skip_nonfinite, master_weights: See `TrustRatioOptimizer`.

    Raises:
        ValueError: A hyper-parameter out of range, a group with an unknown key, no parameters.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = LAMB(exclude_bias_and_norm(model, weight_decay=0.01), lr=1e-3)
    """

    state_names = ("exp_avg", "exp_avg_sq")
    counts_steps = True
    keeps_directions = True
    kernels = "lamb"

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
        trust_clip: float | None = None,
        maximize: bool = False,
        adapt: bool = True,
        *,
        max_grad_norm: float | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        skip_nonfinite: bool = False,
        master_weights: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
            "trust_clip": trust_clip,
            "maximize": maximize,
            "adapt": adapt,
        }
        if max_grad_norm is not None:
            require_number("max_grad_norm", max_grad_norm, positive=True)
        options = RunOptions(
            foreach, fused, capturable, skip_nonfinite, master_weights, max_grad_norm
        )
        super().__init__(params, defaults, options)

    @staticmethod
    def check_group(group: dict[str, Any]) -> None:
        betas = group["betas"]
        require(
            isinstance(betas, (tuple, list)) and len(betas) == 2,
            f"betas={betas!r}, expected two numbers",
        )
        for i, beta in enumerate(betas):
            require_number(f"betas[{i}]", beta, below=1)
        if group["trust_clip"] is not None:
            require_number("trust_clip", group["trust_clip"], positive=True)

    def hyperparameters(self, group: dict[str, Any]) -> dict[str, Any]:
        found = super().hyperparameters(group)
        found["beta1"], found["beta2"] = found.pop("betas")
        clip = found.pop("trust_clip")
        found["trust_clip"] = math.inf if clip is None else clip
        return found

    @staticmethod
    def scalars(h: Scalars) -> Scalars:
        # 1 - beta ** inf = 1
        correction_step = torch.where(h.bias_correction != 0, h.step, torch.inf)
        correction1 = 1 - h.beta1**correction_step
        correction2 = 1 - h.beta2**correction_step
        # (m / c1) / (sqrt(v / c2) + eps) = m / (sqrt(v) * c1 / sqrt(c2) + c1 * eps): fewer sweeps
        # over memory.
        return Scalars(
            gain1=(1 - h.beta1) * h.grad_scale,
            gain2=(1 - h.beta2) * h.grad_scale * h.grad_scale,
            root_scale=correction1 / correction2.sqrt(),
            floor=correction1 * h.eps,
            correction_step=correction_step,
        )

    @staticmethod
    def trust_ratio(w_norm: Tensor, norm: Tensor, h: Scalars) -> Tensor:
        return torch.minimum(w_norm / norm, h.trust_clip)

    @staticmethod
    def rates(ratio: Tensor, h: Scalars) -> Scalars:
        return Scalars(rate=h.lr * ratio)

    @staticmethod
    def accumulate(g: Tensors, state: States, h: Scalars) -> None:
        m, v = state
        torch._foreach_mul_(m, h.beta1)
        add_(m, g, h.gain1)
        torch._foreach_mul_(v, h.beta2)
        torch._foreach_addcmul_(v, torch._foreach_mul(g, h.gain2), g)

    @staticmethod
    def direction(w: Tensors, g: Tensors, state: States, h: Scalars) -> Tensors:
        m, v = state
        root = torch._foreach_sqrt(v)
        torch._foreach_mul_(root, h.root_scale)
        torch._foreach_add_(root, h.floor)
        x = torch._foreach_div(m, root)
        add_(x, w, h.weight_decay)
        return x

    @staticmethod
    def move(w: Tensors, g: Tensors, x: Tensors, state: States, h: Scalars) -> None:
        add_(w, x, h.rate, sign=-1)

    @staticmethod
    def torch_directions(w: Tensors, g: Tensors, state: States, h: Scalars) -> Tensors | None:
        # Adam's step at learning rate -1 adds its direction to what it takes for the weights.
        if list in map(type, (h.beta1, h.beta2, h.eps, h.grad_scale, h.weight_decay)):
            return None
        x = torch._foreach_mul(w, h.weight_decay)
        if h.grad_scale != 1:
            g = torch._foreach_mul(g, h.grad_scale)
        steps = h.correction_step
        if isinstance(steps, float):
            steps = [steps] * len(w)
        torch._fused_adam_(
            x,
            g,
            state[0],
            state[1],
            [],
            list(map(_as_tensor, steps)),
            lr=-1.0,
            beta1=h.beta1,
            beta2=h.beta2,
            weight_decay=0.0,
            eps=h.eps,
            amsgrad=False,
            maximize=False,
        )
        return x

    @staticmethod
    def torch_move(w: Tensors, g: Tensors, state: States, h: Scalars) -> bool:
        if w[0].dtype != torch.float32:
            return False
        # One sweep: AdamW's step with betas so near to 1, and gradients of 0, that the state stays
        # as it is to the bit.
        torch._fused_adamw_(
            w,
            [_zeros(w[0].numel())],
            state[0],
            state[1],
            [],
            [_as_tensor(math.inf)],  # no bias correction: 1 - beta ** inf = 1
            lr=h.rate / h.root_scale,
            beta1=JUST_BELOW_1,
            beta2=JUST_BELOW_1,
            weight_decay=h.weight_decay * h.root_scale,
            eps=h.floor / h.root_scale,
            amsgrad=False,
            maximize=False,
        )
        return True


@functools.lru_cache(maxsize=2)  # whole pieces, and what is left over at the end of a tensor
def _zeros(size: int) -> Tensor:
    return torch.zeros(size)


@functools.lru_cache(maxsize=64)
def _as_tensor(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
