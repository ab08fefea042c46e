"""An encoded image into its place in a batch."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import simplejpeg
import torch
from torch import Tensor

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.loading.crops import Box, Crop

_MAX_REDUCTION = 8


class _Scratch(threading.local):
    """Memory that a thread decodes and crops into, again and again: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self.image = np.empty(0, dtype=np.uint8)
        self.part = np.empty(0, dtype=np.uint8)


_scratch = _Scratch()


def decode_into(out: Tensor, data: bytes, crop: Crop, uniforms: Sequence[float]) -> None:
    """Decode ``data``, and resize the part that ``crop`` chooses into ``out``. All of the work releases the GIL.

    Equal to torchvision's antialiased bilinear `resized_crop` of the decoded image. Where the part of a
    JPEG is at least twice as large as ``out`` on both sides, 1/2, 1/4 or 1/8 of its size is decoded (by the DCT, which
    blurs as it should); the part then starts and ends on whole pixels of the smaller image.

    Args:
        out: 1 x 3 x size x size, uint8, channels last, RGB.

    Raises:
        ValueError, OSError: The image cannot be decoded.
    """
    image, box = _decode(data, crop, uniforms)
    num = box.height * box.width * 3
    if len(_scratch.part) < num:
        _scratch.part = np.empty(num, dtype=np.uint8)
    part = _scratch.part[:num].reshape(box.height, box.width, 3)
    np.copyto(part, image[box.top : box.top + box.height, box.left : box.left + box.width])
    pixels = torch.from_numpy(part).permute(2, 0, 1)[None]
    if box.flip:
        pixels = pixels.flip(-1)
    # what `torch.nn.functional.interpolate(antialias=True)` calls, without the copy that would leave channels last
    torch.ops.aten._upsample_bilinear2d_aa.out(pixels, [crop.size, crop.size], False, None, None, out=out)


def _decode(data: bytes, crop: Crop, uniforms: Sequence[float]) -> tuple[npt.NDArray[np.uint8], Box]:
    if data[:2] == b"\xff\xd8":
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            box = crop.box(height, width, uniforms)
            factor = _reduction(box, crop.size)
            if len(_scratch.image) < height * width * 3:
                _scratch.image = np.empty(height * width * 3, dtype=np.uint8)
            image = simplejpeg.decode_jpeg(
                data,
                min_height=-(-height // factor) if factor > 1 else 0,
                min_width=-(-width // factor) if factor > 1 else 0,
                min_factor=factor,
                buffer=_scratch.image,
            )
            return image, _reduced(box, factor, image.shape) if factor > 1 else box
        except ValueError:
            pass  # CMYK, or damage: Pillow reads the one and describes the other
    image = decode_rgb(data)
    return image, crop.box(image.shape[0], image.shape[1], uniforms)


def _reduction(box: Box, size: int) -> int:
    factor = 1
    while factor < _MAX_REDUCTION and min(box.height, box.width) >= 2 * factor * size:
        factor *= 2
    return factor


def _reduced(box: Box, factor: int, shape: tuple[int, ...]) -> Box:
    """``box`` in an image ``factor`` times smaller, of ``shape``."""
    top, left = round(box.top / factor), round(box.left / factor)
    height, width = round(box.height / factor), round(box.width / factor)
    top, left = min(top, shape[0] - height), min(left, shape[1] - width)
    return Box(max(top, 0), max(left, 0), min(height, shape[0]), min(width, shape[1]), box.flip)
