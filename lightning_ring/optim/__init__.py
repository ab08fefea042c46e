"""Optimizers for large batches, for any training loop: LARS and LAMB."""

from lightning_ring.optim.groups import exclude_bias_and_norm
from lightning_ring.optim.lamb import LAMB
from lightning_ring.optim.lars import LARS

__all__ = ["LAMB", "LARS", "exclude_bias_and_norm"]
