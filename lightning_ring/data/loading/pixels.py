"""An encoded image into its place in a batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.loading.transforms import Box, Crop, reduction

_ALIGNMENT = 64  # bytes: no vector is longer


# what `interpolate` calls, without the copy that would leave channels last; private, so torch may drop it
_resize: Any = getattr(torch._C._nn, "_upsample_bilinear2d_aa", None)


class _Scratch(threading.local):
    """Memory that a thread decodes into, again and again: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self.image = np.empty(0, dtype=np.uint8)

    def room(self, num: int) -> npt.NDArray[np.uint8]:
        """``num`` bytes, none of whose rows is aligned when all are: libjpeg-turbo writes such rows past the caches."""
        if len(self.image) < num:
            fresh = np.empty(num + 2 * _ALIGNMENT, dtype=np.uint8)
            self.image = fresh[-fresh.ctypes.data % _ALIGNMENT + _ALIGNMENT // 2 + 1 :]
        return self.image


_scratch = _Scratch()


def decode_into(out: Tensor, data: bytes, crop: Crop, uniforms: Sequence[float]) -> None:
    """Decode the image ``data`` and resize the part that ``crop`` chooses into ``out``. The expensive work releases the
    GIL.

    Equal to torchvision's antialiased bilinear `resized_crop` of the decoded image, bit for bit. Where the part of a
    JPEG is at least twice as large as ``out`` on both sides, and the crop is not ``exact``, 1/2, 1/4 or 1/8 of the
    image's size is decoded (by the DCT, which blurs as it should). Pixels then differ by about one level of 255.

    Args:
        out: 1 x 3 x size x size, uint8, channels last, RGB.

    Raises:
        ValueError, OSError: The image cannot be decoded.
    """
    image, (top, left, height, width, flip) = _decode(data, crop, uniforms)
    pixels = torch.from_numpy(image[None, top : top + height, left : left + width].transpose(0, 3, 1, 2))
    if flip:
        pixels = pixels.flip(-1)
    if _resize is None:
        out.copy_(interpolate(pixels, [crop.size] * 2, mode="bilinear", antialias=True))
    else:
        _resize(pixels, [crop.size] * 2, False, None, None, out=out)


def _decode(data: bytes, crop: Crop, uniforms: Sequence[float]) -> tuple[npt.NDArray[np.uint8], Box]:
    if data[:2] == b"\xff\xd8":
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            box = crop.box(height, width, uniforms)
            factor = 1 if crop.exact else _whole_pixels(box, reduction(box, crop.size))
            image = simplejpeg.decode_jpeg(
                data,
                min_height=-(-height // factor) if factor > 1 else 0,
                min_width=-(-width // factor) if factor > 1 else 0,
                min_factor=factor,
                buffer=_scratch.room(height * width * 3),
            )
            top, left, height, width = (value // factor for value in box[:4])
            return image, Box(top, left, height, width, box.flip)
        except ValueError:
            pass  # CMYK, or damage: Pillow reads the one and describes the other
    image = decode_rgb(data)
    return image, crop.box(image.shape[0], image.shape[1], uniforms)


def _whole_pixels(box: Box, factor: int) -> int:
    """``factor``, or the largest below it for which ``box`` covers whole pixels of the smaller image."""
    while any(value % factor for value in box[:4]):
        factor //= 2
    return factor
