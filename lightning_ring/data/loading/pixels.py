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
from lightning_ring.data.loading.transforms import Box, Crop, height_and_width, reduction

_ALIGNMENT = 64  # bytes: no vector is longer


# what `interpolate` calls, without the copy that would leave channels last; private, so torch may
# drop it
_resize: Any = getattr(torch._C._nn, "_upsample_bilinear2d_aa", None)


class _Scratch(threading.local):
    """Memory that a thread decodes into, again and again: fresh pages cost more than a copy."""

    def __init__(self) -> None:
        self.image = np.empty(0, dtype=np.uint8)

    def room(self, num: int) -> npt.NDArray[np.uint8]:
        """``num`` bytes, none of whose rows is aligned when all are: libjpeg-turbo writes such
        rows past the caches.
        """
        if len(self.image) < num:
            fresh = np.empty(num + 2 * _ALIGNMENT, dtype=np.uint8)
            self.image = fresh[-fresh.ctypes.data % _ALIGNMENT + _ALIGNMENT // 2 + 1 :]
        return self.image


_scratch = _Scratch()


def decode_into(
    outs: Sequence[Tensor],
    data: bytes | npt.NDArray[np.uint8],
    crops: Sequence[Crop],
    uniforms: Sequence[Sequence[float]],
) -> None:
    """Decode the image ``data`` once, and resize the part that each of ``crops`` chooses into its
    place in ``outs``.

    The expensive work releases the GIL. Equal to torchvision's antialiased bilinear `resized_crop`
    of the decoded image, bit for bit. Where the part of a JPEG is at least twice as large as the
    result on both sides, for every crop, and no crop is ``exact``, 1/2, 1/4 or 1/8 of the image's
    size is decoded (by the DCT, which blurs as it should). Pixels then differ by about one level of
    255.

    Args:
        outs: 1 x 3 x height x width each, uint8, channels last, RGB.
        data: Encoded, or its pixels: height x width x 3.
        uniforms: Of each crop.

    Raises:
        ValueError, OSError: The image cannot be decoded.
    """
    image, boxes = _decode(data, crops, uniforms)
    for out, crop, (top, left, height, width, flip) in zip(outs, crops, boxes, strict=True):
        pixels = torch.from_numpy(
            image[None, top : top + height, left : left + width].transpose(0, 3, 1, 2)
        )
        if flip:
            pixels = pixels.flip(-1)
        size = height_and_width(crop.size)
        if _resize is None:
            out.copy_(interpolate(pixels, size, mode="bilinear", antialias=True))
        else:
            _resize(pixels, size, False, None, None, out=out)


def _decode(
    data: bytes | npt.NDArray[np.uint8], crops: Sequence[Crop], uniforms: Sequence[Sequence[float]]
) -> tuple[npt.NDArray[np.uint8], list[Box]]:
    if isinstance(data, np.ndarray):
        return data, _boxes(data.shape[0], data.shape[1], crops, uniforms)
    if data[:2] == b"\xff\xd8":
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            boxes = _boxes(height, width, crops, uniforms)
            factor = min(
                1 if crop.exact else _whole_pixels(box, reduction(box, crop.size))
                for crop, box in zip(crops, boxes, strict=True)
            )
            image = simplejpeg.decode_jpeg(
                data,
                min_height=-(-height // factor) if factor > 1 else 0,
                min_width=-(-width // factor) if factor > 1 else 0,
                min_factor=factor,
                buffer=_scratch.room(height * width * 3),
            )
            return image, [_smaller(box, factor) for box in boxes]
        except ValueError:
            pass  # CMYK, or damage: Pillow reads the one and describes the other
    image = decode_rgb(data)
    return image, _boxes(image.shape[0], image.shape[1], crops, uniforms)


def _boxes(
    height: int, width: int, crops: Sequence[Crop], uniforms: Sequence[Sequence[float]]
) -> list[Box]:
    return [crop.box(height, width, numbers) for crop, numbers in zip(crops, uniforms, strict=True)]


def _smaller(box: Box, factor: int) -> Box:
    top, left, height, width = (value // factor for value in box[:4])
    return Box(top, left, height, width, box.flip)


def _whole_pixels(box: Box, factor: int) -> int:
    """``factor``, or the largest below it for which ``box`` covers whole pixels of the smaller
    image.
    """
    while any(value % factor for value in box[:4]):
        factor //= 2
    return factor
