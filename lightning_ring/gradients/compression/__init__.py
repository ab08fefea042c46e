"""What gradients travel as: one file for each way."""

from collections.abc import Callable

from lightning_ring.gradients.compression.bf16 import BF16
from lightning_ring.gradients.compression.compressor import Compressor
from lightning_ring.gradients.compression.fp16 import FP16
from lightning_ring.gradients.compression.powersgd import PowerSGD

COMPRESSORS: dict[str, Callable[[], Compressor]] = {"fp16": FP16, "bf16": BF16, "powersgd": PowerSGD}

__all__ = ["BF16", "COMPRESSORS", "FP16", "Compressor", "PowerSGD"]
