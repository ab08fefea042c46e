"""Crops, decoding into a place in a batch, and on the device normalisation and colours."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from lightning_ring.data.decoding import MAX_PIXELS, Data, decode_rgb
from lightning_ring.errors import ConfigurationError

_MAX_REDUCTION = 8


class Box(NamedTuple):
    """Rows ``top`` to ``top + height``, columns ``left`` to ``left + width``, then mirrored if
    ``flip``.
    """

    top: int
    left: int
    height: int
    width: int
    flip: bool


Size = int | tuple[int, int]
"""Pixels of both sides, or height and width."""


def height_and_width(size: Size) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


class Crop(Protocol):
    """Chooses the part of an image that becomes ``size`` pixels, from ``num_uniforms`` numbers in
    [0, 1).

    Unless it is ``exact``, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size: at the fraction
    that still has twice the pixels of ``size`` on both sides (`part_of`).
    """

    @property
    def size(self) -> Size: ...
    @property
    def exact(self) -> bool: ...
    @property
    def num_uniforms(self) -> int: ...
    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box: ...


def part_of(crop: Crop, height: int, width: int, uniforms: Sequence[float]) -> tuple[Box, int]:
    """The part of an image that ``crop`` chooses, and the power of two, at most 8, by which a JPEG
    may be decoded smaller; the part is then without the few pixels at its sides that are no whole
    ones.
    """
    box = crop.box(height, width, uniforms)
    if crop.exact:
        return box, 1
    factor, (rows, columns) = 1, height_and_width(crop.size)
    while (
        factor < _MAX_REDUCTION
        and box.height >= 2 * factor * rows
        and box.width >= 2 * factor * columns
    ):
        factor *= 2
    top, left, height, width = (value // factor * factor for value in box[:4])
    return Box(top, left, height, width, box.flip), factor


@dataclass(frozen=True, slots=True)
class RandomResizedCrop:
    """A part of random area and aspect ratio, mirrored half of the time: torchvision's
    `RandomResizedCrop` and flip.

    Args:
        size: Pixels of the result's sides; ``(height, width)`` where they differ.
        scale: Lowest and highest share of the image's area.
        ratio: Lowest and highest width / height of the part.
        flip: Probability of mirroring.
        exact: torchvision's pixels bit for bit, also of parts that are twice ``size`` or larger.
            Otherwise a JPEG is decoded at a fraction of its size there, which is far faster, and
            the part is up to 7 pixels smaller.
    """

    size: Size = 224
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    exact: bool = False

    @property
    def num_uniforms(self) -> int:
        return 3 + 2 * _TRIES

    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box:
        """Inception-style cropping (Szegedy et al. 2014): ten tries, then the largest centred
        part within ``ratio``.
        """
        flip = uniforms[2] < self.flip
        smallest, largest = self.scale
        low, high = map(math.log, self.ratio)
        for turn in range(_TRIES):
            area = height * width * (smallest + (largest - smallest) * uniforms[3 + 2 * turn])
            aspect = math.exp(low + (high - low) * uniforms[4 + 2 * turn])
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                top = int(uniforms[0] * (height - h + 1))
                left = int(uniforms[1] * (width - w + 1))
                return Box(top, left, h, w, flip)
        w = min(width, round(height * self.ratio[1]))
        h = min(height, round(width / self.ratio[0]))
        return Box((height - h) // 2, (width - w) // 2, max(h, 1), max(w, 1), flip)


@dataclass(frozen=True, slots=True)
class CenterCrop:
    """The centre, as if the shorter side were resized to ``resize`` pixels and ``size`` cut out.

    Args:
        size, exact: As in `RandomResizedCrop`.

    Raises:
        ConfigurationError: ``size`` is more than ``resize``: the part would reach beyond the image.
    """

    size: Size = 224
    resize: int = 256
    num_uniforms: int = 0
    exact: bool = False

    def __post_init__(self) -> None:
        sides = height_and_width(self.size)
        if not 1 <= min(sides) <= max(sides) <= self.resize:
            raise ConfigurationError(
                f"CenterCrop cannot cut {self.size} pixels out of a shorter side resized to "
                f"{self.resize}. Give size >= 1 and resize >= size."
            )

    def box(self, height: int, width: int, uniforms: Sequence[float]) -> Box:
        shorter = min(height, width)
        h, w = (max(1, round(shorter * side / self.resize)) for side in height_and_width(self.size))
        return Box((height - h) // 2, (width - w) // 2, h, w, False)


_TRIES = 10


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_GRAY = (0.2989, 0.587, 0.114)
_BRIGHTNESS, _CONTRAST = 0, 1  # then saturation


class DeviceTransform(nn.Module):
    """uint8 images to normalised floats, with random brightness, contrast and saturation of each
    image.

    As torchvision's `ColorJitter` (each factor uniform in [1 - x, 1 + x], at least 0; applied in
    this order), then `Normalize`.

    Args:
        mean, std: Of the three channels, for pixels in [0, 1].
        brightness, contrast, saturation: How far the factors reach; 0 leaves the images as they
            are.
        dtype: Of the result.
    """

    num_uniforms = 3

    def __init__(
        self,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        *,
        brightness: float = 0.0,
        contrast: float = 0.0,
        saturation: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.reach = brightness, contrast, saturation
        self.dtype = dtype
        scale = 1 / (255 * torch.tensor(std, dtype=torch.float64))
        shift = -255 * torch.tensor(mean, dtype=torch.float64) * scale
        self.scale = nn.Buffer(scale.to(dtype))
        self.shift = nn.Buffer(shift.to(dtype))
        self.gray = nn.Buffer(torch.tensor(_GRAY, dtype=dtype), persistent=False)

    @property
    def is_random(self) -> bool:
        return any(self.reach)

    def forward(
        self, images: Tensor, uniforms: Tensor | None = None, *, out: Tensor | None = None
    ) -> Tensor:
        """``images``: batch x 3 x height x width, uint8; ``uniforms``: batch x 3. The result is
        channels last.

        With ``out`` (the shape of ``images``, channels last, of this `dtype`) it is written there.
        """
        rows = images.permute(0, 2, 3, 1)
        if out is None:
            out = torch.empty(rows.shape, dtype=self.dtype, device=rows.device).permute(0, 3, 1, 2)
        done = out.permute(0, 2, 3, 1)
        # Whole rows at a time: along three channels a CPU would not use its vector units.
        width = rows.shape[2]
        scale, shift = self.scale.repeat(width), self.shift.repeat(width)
        # A CPU takes one image at a time, which then stays in its cache.
        num = 1 if rows.device.type == "cpu" else max(1, len(rows))
        for start in range(0, len(rows), num):
            part = slice(start, start + num)
            pixels = rows[part].to(self.dtype)
            if self.is_random:
                assert uniforms is not None
                pixels = self._jitter(pixels, uniforms[part].to(self.dtype))
            pixels = pixels.reshape(-1, 3 * width)
            torch.addcmul(shift, pixels, scale, out=done[part].view(-1, 3 * width))
        return out

    def _jitter(self, rows: Tensor, uniforms: Tensor) -> Tensor:
        """``rows``: batch x height x width x 3, 0 to 255."""
        for change, reach in enumerate(self.reach):
            if reach == 0:
                continue
            low = max(0.0, 1 - reach)
            factor = (low + (1 + reach - low) * uniforms[:, change]).view(-1, 1, 1, 1)
            if change == _BRIGHTNESS:
                rows = rows * factor
            else:
                gray = (rows * self.gray).sum(-1, keepdim=True)
                other = gray.mean((1, 2, 3), keepdim=True) if change == _CONTRAST else gray
                rows = torch.lerp(other.expand_as(rows), rows, factor)
            rows.clamp_(0, 255)
        return rows


_ALIGNMENT = 64  # bytes: no vector is longer
_MOST_KEPT = 64 * 2**20  # bytes a thread: a larger image has memory of its own


class _Scratch(threading.local):
    """Memory that a thread decodes into, again and again: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self.image = np.empty(0, dtype=np.uint8)

    def room(self, num: int) -> npt.NDArray[np.uint8]:
        """``num`` bytes, none of whose rows is aligned when all are: libjpeg-turbo writes such
        rows past the caches.
        """
        if len(self.image) >= num:
            return self.image
        fresh = np.empty(num + 2 * _ALIGNMENT, dtype=np.uint8)
        fresh = fresh[-fresh.ctypes.data % _ALIGNMENT + _ALIGNMENT // 2 + 1 :]
        if num <= _MOST_KEPT:
            self.image = fresh
        return fresh


_scratch = _Scratch()


def decode_into(out: Tensor, data: Data, crop: Crop, uniforms: Sequence[float]) -> None:
    """Decode the image ``data``, and resize the part that ``crop`` chooses into ``out``.

    The expensive work releases the GIL. Equal to torchvision's antialiased bilinear `resized_crop`
    of the decoded image, bit for bit. Where the part of a JPEG is at least twice as large as the
    result on both sides, and the crop is not ``exact``, 1/2, 1/4 or 1/8 of the image's size is
    decoded (by the DCT, which blurs as it should). Pixels then differ by about one level of 255.

    Args:
        out: 1 x 3 x height x width, uint8, channels last, RGB.
        data: Encoded, or its pixels: height x width x 3.

    Raises:
        ValueError, OSError: The image cannot be decoded, or has more than `MAX_PIXELS`.
    """
    image, box, factor = _decode(data, crop, uniforms)
    top, left, height, width = (value // factor for value in box[:4])
    part = image[None, top : top + height, left : left + width].transpose(0, 3, 1, 2)
    pixels = torch.from_numpy(part)
    if box.flip:
        pixels = pixels.flip(-1)
    size = height_and_width(crop.size)
    out.copy_(interpolate(pixels, size, mode="bilinear", antialias=True))


def _decode(
    data: Data, crop: Crop, uniforms: Sequence[float]
) -> tuple[npt.NDArray[np.uint8], Box, int]:
    """The image, of which every side may be smaller by the factor; and the part of the whole."""
    if isinstance(data, bytes) and data[:2] == b"\xff\xd8":
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            if height * width > MAX_PIXELS:
                raise ValueError("decode_rgb says so")
            box, factor = part_of(crop, height, width, uniforms)
            image = simplejpeg.decode_jpeg(
                data,
                min_height=-(-height // factor),
                min_width=-(-width // factor),
                min_factor=factor,
                buffer=_scratch.room(height * width * 3),
            )
            return image, box, factor
        except ValueError:
            pass  # CMYK, or damage: Pillow reads the one and describes the other
    image = data if isinstance(data, np.ndarray) else decode_rgb(data)
    return image, part_of(crop, image.shape[0], image.shape[1], uniforms)[0], 1
