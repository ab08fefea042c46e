"""Which part of an image is taken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lightning_ring.errors import ConfigurationError


class Box(NamedTuple):
    """Rows ``top`` to ``top + height``, columns ``left`` to ``left + width``, then mirrored if ``flip``."""

    top: int
    left: int
    height: int
    width: int
    flip: bool


class Crop(Protocol):
    """Chooses the part of an image that becomes ``size`` x ``size`` pixels, from ``num_uniforms`` numbers in [0, 1)."""

    @property
    def size(self) -> int: ...
    @property
    def num_uniforms(self) -> int: ...
    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box: ...


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A part of random area and aspect ratio, mirrored half of the time: torchvision's `RandomResizedCrop` and flip.

    Args:
        size: Pixels of the result's side.
        scale: Lowest and highest share of the image's area.
        ratio: Lowest and highest width / height.
        flip: Probability of mirroring.
    """

    size: int = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5

    @property
    def num_uniforms(self) -> int:
        return 3 + 2 * _TRIES

    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box:
        """Inception-style cropping (Szegedy et al. 2014): ten tries, then the largest centred part within ``ratio``."""
        flip = uniforms[2] < self.flip
        low, high = math.log(self.ratio[0]), math.log(self.ratio[1])
        for turn in range(_TRIES):
            area = height * width * (self.scale[0] + (self.scale[1] - self.scale[0]) * uniforms[3 + 2 * turn])
            aspect = math.exp(low + (high - low) * uniforms[4 + 2 * turn])
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return Box(int(uniforms[0] * (height - h + 1)), int(uniforms[1] * (width - w + 1)), h, w, flip)
        w = min(width, round(height * self.ratio[1]))
        h = min(height, round(width / self.ratio[0]))
        return Box((height - h) // 2, (width - w) // 2, max(h, 1), max(w, 1), flip)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The centre, as if the shorter side were resized to ``resize`` pixels and ``size`` x ``size`` cut out.

    Raises:
        ConfigurationError: ``size`` is more than ``resize``: the part would reach beyond the image.
    """

    size: int = 224
    resize: int = 256
    num_uniforms: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= self.resize:
            raise ConfigurationError(
                f"CenterCrop cannot cut {self.size} pixels out of a shorter side resized to {self.resize}. "
                "Give size >= 1 and resize >= size."
            )

    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box:
        side = max(1, round(min(height, width) * self.size / self.resize))
        return Box((height - side) // 2, (width - side) // 2, side, side, False)


_TRIES = 10
