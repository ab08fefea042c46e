"""Encoded images to uint8 arrays."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt
import simplejpeg
from PIL import Image

# Of one image, as Pillow has it: 512 MiB of RGB. A file of a few hundred bytes may say any size.
MAX_PIXELS = 178_956_970


def decode_rgb(data: bytes | bytearray | memoryview) -> npt.NDArray[np.uint8]:
    """Pixels of an encoded image, height x width x 3, uint8. JPEGs release the GIL while they are
    decoded.

    Raises:
        ValueError, OSError: Neither simplejpeg nor Pillow can decode it, or it has more than
            `MAX_PIXELS`, by its header.
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
    # SyntaxError, DecompressionBombError, ...: Pillow's plugins raise of every kind
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def gray_of_16_bits(image: Any) -> npt.NDArray[np.uint8] | None:
    """8 bits of the gray pixels of ``image`` (of Pillow) if they reach from 0 to 65,535, else
    None.
    """
    # Pillow holds 16 bits of a PNG in mode I, too, and scales those of a PGM to them
    is_png = image.mode == "I" and image.format in ("PNG", "PPM")
    if not is_png and not image.mode.startswith("I;16"):
        return None
    # Pillow's own conversion clips at 255
    return (np.asarray(image).astype(np.uint32) >> 8).astype(np.uint8)


def rgb_pixels(image: Any) -> npt.NDArray[np.uint8]:
    """Pixels of an image of Pillow, height x width x 3.

    Raises:
        ValueError: The range of its pixels is not known.
    """
    if (gray := gray_of_16_bits(image)) is not None:
        return np.repeat(gray[..., None], 3, axis=2)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"pixels of mode {image.mode} have no known range, expected 8 or 16 bits a channel"
        )
    return np.array(image.convert("RGB"))
