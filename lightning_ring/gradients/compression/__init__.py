"""What gradients travel as: one file for each way."""

from lightning_ring.gradients.compression.compressor import Compressor

__all__ = ["Compressor"]
