"""Encoded images to uint8 arrays."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image


def decode_rgb(data: bytes | bytearray | memoryview) -> npt.NDArray[np.uint8]:
    """Pixels of an encoded image, height x width x 3, uint8. JPEGs release the GIL while they are decoded.

    Raises:
        ValueError, OSError: Neither simplejpeg nor, for what it cannot read, Pillow can decode it.
    """
    if bytes(data[:2]) == b"\xff\xd8":
        try:
            pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB")
            return pixels
        except ValueError:
            pass  # CMYK, or damage that Pillow may tolerate
    image: Any = Image.open(BytesIO(data))
    return np.array(image.convert("RGB"))
