"""Encoded images to uint8 arrays."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

# Pillow's limit, 512 MiB of RGB: a tiny file may claim any size.
MAX_PIXELS = 178_956_970

Data = bytes | npt.NDArray[np.uint8]
"""An encoded image, or its pixels: height x width x 3."""


def decode_rgb(data: bytes | bytearray | memoryview) -> npt.NDArray[np.uint8]:
    """Pixels of an encoded image, height x width x 3, uint8. Decoding a JPEG releases the GIL.

    Raises:
        ValueError, OSError: It cannot be decoded, or its header claims more than `MAX_PIXELS`.
    """
    if bytes(data[:2]) == b"\xff\xd8":
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            if height * width <= MAX_PIXELS:
                pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB")
                return pixels
        except ValueError:
            pass  # CMYK, or damage that Pillow may tolerate
    try:
        image = Image.open(BytesIO(data))  # reads the header only
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f"its header says {image.width} x {image.height} pixels, expected at most "
                f"{MAX_PIXELS:,}"
            )
        return rgb_pixels(image)
    except (ValueError, OSError, MemoryError):
        raise
    # Pillow's plugins raise errors of every kind
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def eight_bits(image: Any) -> Any:
    """``image`` (of Pillow) as RGB or gray (L).

    Raises:
        ValueError: The range of its pixels is not known.
    """
    # Pillow holds 16-bit PNG and PGM in mode I too
    is_png = image.mode == "I" and image.format in ("PNG", "PPM")
    if is_png or image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(
            f"pixels of mode {image.mode} have no known range, expected 8 or 16 bits a channel"
        )
    if image.mode in ("L", "RGB"):
        return image
    return image.convert("L" if image.mode == "1" else "RGB")


def rgb_pixels(image: Any) -> npt.NDArray[np.uint8]:
    """Pixels of a Pillow image, height x width x 3; raises as `eight_bits`."""
    return np.array(eight_bits(image).convert("RGB"))
