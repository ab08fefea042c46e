"""Nested values with tensors in them, parted into a small outline, which is pickled, and the
tensors, which are not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Stands for a tensor in what is pickled."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    on_accelerator: bool

    def empty(self, device: torch.device) -> Tensor:
        """In the sender's order of memory: sums over it (LAMB's norms) then have the same bits
        on all ranks.
        """
        on = device if self.on_accelerator else "cpu"
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=on)


def outline(value: Any, tensors: list[Tensor]) -> Any:
    """``value`` with a `TensorSpec` for each tensor, which is appended to ``tensors``."""
    if isinstance(value, Tensor):
        tensors.append(value)
        # dense, also of a tensor that repeats elements
        strides = torch.empty_like(value, device="meta").stride()
        return TensorSpec(
            len(tensors) - 1, value.dtype, tuple(value.shape), strides, value.device.type != "cpu"
        )
    if isinstance(value, dict):
        return {key: outline(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(outline(item, tensors) for item in value)
    return value


def filled(outlined: Any, tensors: list[Tensor]) -> Any:
    """The value of an `outline`, with ``tensors`` in it."""
    if isinstance(outlined, TensorSpec):
        return tensors[outlined.index]
    if isinstance(outlined, dict):
        return {key: filled(item, tensors) for key, item in outlined.items()}
    if type(outlined) in (list, tuple):
        return type(outlined)(filled(item, tensors) for item in outlined)
    return outlined


def specs_in(outlined: Any) -> list[TensorSpec]:
    """The specs of an outline, in the order of its tensors."""
    return [spec for _, spec in _by_place(outlined)]


def _by_place(outlined: Any) -> list[tuple[str, TensorSpec]]:
    pairs, _ = tree_flatten_with_path(outlined)
    placed = [(str(place), spec) for place, spec in pairs if isinstance(spec, TensorSpec)]
    return sorted(placed, key=lambda pair: pair[1].index)
