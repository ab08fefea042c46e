"""The loss scaler of a fit whose steps may be done again, or be finished without another
backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def forget_unscaling(precision: Any) -> None:
    """A scaler divides gradients once a step; those of the step under way are dropped."""
    if (scaler := getattr(precision, "scaler", None)) is not None:
        scaler._per_optimizer_states.clear()


@contextmanager
def already_unscaled(precision: Any) -> Iterator[None]:
    """Around the optimizer's step of averages that were divided, and looked through for
    infinities, before.
    """
    if (scaler := getattr(precision, "scaler", None)) is None:
        yield
        return
    scaler.unscale_ = lambda optimizer: None
    try:
        yield
    finally:
        del scaler.unscale_
