"""Loading optimizer state without torch's cast to the parameter's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_ring.optim.engine.parameter_list import compute_dtype


def load_precisely(optimizer: Optimizer, state_dict: dict[str, Any], load: Any) -> None:
    """Run ``load(state_dict)`` (`Optimizer.load_state_dict`), then put the values back that it rounded.

    torch casts floating-point state to the parameter's dtype, which would round the float32 state of a bfloat16
    parameter. What hooks of the optimizer make of ``state_dict`` is what counts; hooks that run after loading see the
    final state. Tensors are copied, so that the optimizer and ``state_dict`` share no memory.
    """
    seen: dict[str, Any] = {}

    def remember(_: Optimizer, final: dict[str, Any]) -> None:
        seen.update(final)

    def restore(_: Optimizer) -> None:
        saved_ids = [i for group in seen["param_groups"] for i in group["params"]]
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for saved_id, param in zip(saved_ids, params, strict=True):
            for key, value in seen["state"].get(saved_id, {}).items():
                if isinstance(value, Tensor):
                    dtype = torch.float32 if key == "step" else compute_dtype(param)
                    optimizer.state[param][key] = _copy_like(param, value, dtype)

    handles = [
        optimizer.register_load_state_dict_pre_hook(remember),
        optimizer.register_load_state_dict_post_hook(restore, prepend=True),
    ]
    try:
        load(state_dict)
    finally:
        for handle in handles:
            handle.remove()


def _copy_like(param: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy of ``value`` on the parameter's device, laid out in memory as the parameter is."""
    if value.shape != param.shape:
        return value.detach().to(device=param.device, dtype=dtype, copy=True)
    return torch.empty_like(param, dtype=dtype, requires_grad=False).copy_(value)
