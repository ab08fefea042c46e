"""Parameter groups for layer-wise optimizers."""

from __future__ import annotations

from typing import Any

from torch import nn


def exclude_bias_and_norm(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups in which biases and normalization layers neither decay nor adapt.

    The first group decays by ``weight_decay``; the second has ``weight_decay=0`` and
    ``adapt=False`` (MLPerf's skip list for LARS). A bias is a parameter named ``bias`` or
    ``..._bias``; a normalization layer is a module whose class, or one that it derives from, has
    "norm" in its name. Parameters come with their names, frozen ones too; a group without
    parameters is left out.

    Raises:
        ValueError: ``module`` has no parameters.
    """
    decayed: list[tuple[str, nn.Parameter]] = []
    excluded: list[tuple[str, nn.Parameter]] = []
    seen: set[nn.Parameter] = set()
    for module_name, part in module.named_modules():
        is_norm = any("norm" in kind.__name__.lower() for kind in type(part).__mro__)
        # Only the leaf of a norm-like class: a container called "NormedBlock" must not exclude its
        # own convolutions.
        for name, param in part.named_parameters(module_name, recurse=False):
            if param in seen:
                continue
            seen.add(param)
            is_bias = f".{name}".endswith((".bias", "_bias"))
            (excluded if is_norm or is_bias else decayed).append((name, param))
    if not seen:
        raise ValueError(f"{type(module).__name__} has no parameters to optimize")
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": excluded, "weight_decay": 0.0, "adapt": False},
    ]
    return [group for group in groups if group["params"]]
