"""Which sample comes when: orders that are functions of (seed, epoch, position), and who takes which part of them."""

from lightning_ring.data.sampling.balanced import BalancedSampler
from lightning_ring.data.sampling.pk import PKSampler
from lightning_ring.data.sampling.sampler import OrderedSampler, Remainder, ShuffledSampler

__all__ = ["BalancedSampler", "OrderedSampler", "PKSampler", "Remainder", "ShuffledSampler"]
