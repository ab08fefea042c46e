"""The number of images in a batch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def first_dimension(batch: Any) -> int:
    """Length of the first tensor in ``batch`` (any nesting of tuples, lists and dicts).

    Raises `TypeError`: there is no tensor with a batch dimension.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise TypeError(
        f"There is no tensor with a batch dimension in a batch of type {type(batch).__name__}, by "
        "which to count its images. Give the callback batch_size=, a function from a batch to its "
        "number of images."
    )
