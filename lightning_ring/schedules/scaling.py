"""Learning rate as a function of the global batch size (images per optimizer step, over all
ranks).
"""

from __future__ import annotations

import math


def linear_scaled_lr(base_lr: float, global_batch_size: int, base_batch_size: int = 256) -> float:
    """``base_lr * global_batch_size / base_batch_size``: the linear scaling rule, for SGD and LARS.

    Args:
        base_lr: Learning rate that is right for ``base_batch_size``.
        global_batch_size: Samples in one optimizer step: per rank x ranks x accumulated
            micro-batches.
        base_batch_size: The batch size that ``base_lr`` was tuned for.

    Raises:
        ValueError: An argument that is not positive and finite.

    Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017, arXiv:1706.02677), section 2.1.

    Examples:
        >>> linear_scaled_lr(0.1, 8192)
        3.2
    """
    return base_lr * _ratio(base_lr, global_batch_size, base_batch_size)


def sqrt_scaled_lr(base_lr: float, global_batch_size: int, base_batch_size: int = 256) -> float:
    """``base_lr * sqrt(global_batch_size / base_batch_size)``: the square-root rule, for LAMB and
    Adam.

    Arguments and errors are those of `linear_scaled_lr`.

    Source: You et al., "Large Batch Optimization for Deep Learning" (2019, arXiv:1904.00962),
        section 4.

    Examples:
        >>> sqrt_scaled_lr(0.001, 1024)
        0.002
    """
    return base_lr * math.sqrt(_ratio(base_lr, global_batch_size, base_batch_size))


def _ratio(base_lr: float, global_batch_size: int, base_batch_size: int) -> float:
    arguments = {
        "base_lr": base_lr,
        "global_batch_size": global_batch_size,
        "base_batch_size": base_batch_size,
    }
    for name, value in arguments.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value}, expected a positive number")
    return global_batch_size / base_batch_size
