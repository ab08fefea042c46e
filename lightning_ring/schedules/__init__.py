"""Learning rates for large batches: how far to scale them, how to warm them up, how to bring
them down.
"""

from lightning_ring.schedules.scaling import linear_scaled_lr, sqrt_scaled_lr
from lightning_ring.schedules.scheduler import WarmupLR
from lightning_ring.schedules.warmup import (
    gradual_warmup,
    warmup_cosine,
    warmup_multistep,
    warmup_poly,
)

__all__ = [
    "WarmupLR",
    "gradual_warmup",
    "linear_scaled_lr",
    "sqrt_scaled_lr",
    "warmup_cosine",
    "warmup_multistep",
    "warmup_poly",
]
