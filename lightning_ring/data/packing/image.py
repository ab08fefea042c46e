"""Images as they go into a shard: copied if they are small, else shrunk; always 8 bits a
channel.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from typing import Any

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageOps

from lightning_ring.data.decoding import eight_bits
from lightning_ring.data.packing.sources import Sources
from lightning_ring.errors import ConfigurationError, ShardError

# formats that may be copied
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
_AS_IT_IS = {
    "jpg": {"L", "RGB"},
    "png": {"1", "L", "P", "LA", "RGB", "RGBA"},
    "webp": {"RGB", "RGBA"},
}


@dataclass(frozen=True, slots=True)
class PackSettings:
    """The settings that decide the bytes of a packing; the number of workers is not one of them.

    Args:
        size: Shorter side, in pixels, to which larger images are shrunk; 0 leaves all at their
            size.
        shard_mb: Largest shard, in MiB; one image that is larger has a shard of its own.
        quality: JPEG quality (1 to 100) of images that are encoded anew.
        group_by_class: Keep the images of a class together, classes in the order of their numbers.
            Else images are mixed once, the same way every time, so that a reader that streams sees
            all classes.
        upright: Turn images by their EXIF orientation. Else they are as torchvision's `ImageFolder`
            sees them.

    Raises:
        ConfigurationError: A value outside its range.
    """

    size: int = 256
    shard_mb: float = 256
    quality: int = 90
    group_by_class: bool = False
    upright: bool = False

    def __post_init__(self) -> None:
        for option, value, fits, expected in (
            ("--size", self.size, self.size >= 0, "pixels of the shorter side, or 0: any"),
            ("--shard-mb", self.shard_mb, 0 < self.shard_mb <= 2**20, "MiB, at most 2^20 (1 TiB)"),
            ("--quality", self.quality, 1 <= self.quality <= 100, "a JPEG quality from 1 to 100"),
        ):
            if not fits:
                raise ConfigurationError(f"{option} {value}: expected {expected}.")


@dataclass(frozen=True, slots=True)
class PackedImage:
    data: bytes  # a whole file
    extension: str
    # "copied" byte for byte, "shrunk", "turned" (encoded anew for its EXIF orientation), or
    # "converted"
    how: str
    note: str = ""  # the changes beyond shrinking and turning, for the report
    lies: bool = False  # its EXIF orientation was not applied


def prepare_image(data: bytes, settings: PackSettings) -> PackedImage | str:
    """The image of the file ``data`` with its shorter side at most ``settings.size`` pixels (0:
    any), RGB or gray; or the reason why it cannot be packed: the file is no image, is cut short, or
    its pixels have no 8-bit meaning.

    Every byte that is copied was decoded once, so what is packed can be read. Colour profiles are
    kept where a file is copied and ignored where it is encoded anew, as torchvision's image folder
    ignores them.
    """
    try:
        return _prepare(data, settings)
    except MemoryError:
        raise
    except Image.UnidentifiedImageError:
        what = f"not an image; it starts with {data[:12]!r}" if data else "the file is empty"
        return f"cannot be decoded: {what}"
    # decoders raise of every kind on broken files, and one must not end a packing
    except Exception as error:
        return f"cannot be decoded: {type(error).__name__}: {error}"


def _prepare(data: bytes, settings: PackSettings) -> PackedImage:
    size = settings.size
    image: Any = Image.open(BytesIO(data))  # reads the header only
    orientation = image.getexif().get(ExifTags.Base.Orientation)
    lies = orientation in range(2, 9)
    turns = lies and settings.upright
    small = size == 0 or min(image.size) <= size
    notes = _notes(image)
    extension = _EXTENSIONS.get(image.format, "")
    as_it_is = small and not turns and not notes and image.mode in _AS_IT_IS.get(extension, ())
    decoded = image
    if extension == "jpg" and image.mode in ("L", "RGB"):
        try:
            decoded = _decode_jpeg(data, image.mode, small, size)
        except ValueError as damage:
            notes.append(f"damaged JPEG, as Pillow reads it ({damage})")
            as_it_is = False
    if decoded is image:
        image.load()  # raises where Pillow cannot read it either
    if as_it_is:
        return PackedImage(data, extension, "copied", lies=lies)
    if not extension:
        notes.append(f"{image.format} to JPEG")
    pixels = eight_bits(decoded)
    if pixels is not decoded:
        is_deep = decoded.mode.startswith("I")
        notes.append("16-bit gray to 8" if is_deep else f"{decoded.mode} to {pixels.mode}")
    if not small:
        shrunk = tuple(max(size, round(side * size / min(image.size))) for side in image.size)
        pixels = pixels.resize(shrunk, Image.Resampling.BICUBIC, reducing_gap=2.0)
    if turns:
        pixels.getexif()[ExifTags.Base.Orientation] = orientation
        pixels = ImageOps.exif_transpose(pixels)
    how = "converted" if notes else "shrunk" if not small else "turned"
    encoded = encode_jpeg(pixels, settings.quality)
    return PackedImage(encoded, "jpg", how, "; ".join(notes), lies and not turns)


def _notes(image: Any) -> list[str]:
    notes = []
    if image.format not in ("JPEG", "MPO") and getattr(image, "is_animated", False):
        notes.append(f"the first of {image.n_frames} frames")
    if image.mode == "RGB" and any(";16" in str(tile[3]) for tile in image.tile):
        notes.append("16 bits a channel to 8")
    return notes


def _decode_jpeg(data: bytes, mode: str, small: bool, size: int) -> Any:
    """Decoded at half, quarter or eighth scale where that leaves twice ``size``: far faster, and
    then resized.
    """
    least = 0 if small else 2 * size
    pixels = simplejpeg.decode_jpeg(
        data,
        colorspace="GRAY" if mode == "L" else "RGB",
        min_height=least,
        min_width=least,
        strict=True,
    )
    return Image.fromarray(pixels[:, :, 0] if mode == "L" else pixels)


def encode_jpeg(image: Any, quality: int) -> bytes:
    """``image`` (RGB or gray) as a baseline JPEG, 4:2:0. Releases the GIL."""
    gray = image.mode == "L"
    pixels = np.atleast_3d(np.asarray(image))
    encoded: bytes = simplejpeg.encode_jpeg(
        pixels, quality, "GRAY" if gray else "RGB", "Gray" if gray else "420", fastdct=False
    )
    return encoded


def prepared_images(
    sources: Sources, positions: range, settings: PackSettings, pool: ThreadPoolExecutor, ahead: int
) -> Iterator[tuple[int, PackedImage | str]]:
    """For each source of ``positions``: its number, and the image or the reason why it is left out.

    Decoding, resizing and encoding release the GIL. At most ``ahead`` images wait in memory. Raises
    `ShardError`: A source is there but cannot be read (a failing disk, a network file system that
    is gone).
    """
    futures = (
        (position, pool.submit(_prepare_source, sources, settings, position))
        for position in positions
    )
    waiting = deque(islice(futures, ahead))
    while waiting:
        position, future = waiting.popleft()
        waiting.extend(islice(futures, 1))
        yield position, future.result()


# a path that leads nowhere; any other error is the disk's
_OF_THE_PATH = {
    getattr(errno, name)
    for name in ("ENOENT", "ENOTDIR", "EACCES", "EPERM", "ELOOP", "ENAMETOOLONG")
}


def _prepare_source(sources: Sources, settings: PackSettings, position: int) -> PackedImage | str:
    path = sources.path(position)
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # reading a pipe would wait for ever
            return "cannot be read: not a regular file"
        return prepare_image(path.read_bytes(), settings)
    except ValueError as error:  # a zero byte in the path
        return f"cannot be read: {error}"
    except OSError as error:
        gone = not os.path.exists(sources.folder)  # or every image would be left out, one by one
        if not gone and error.errno in _OF_THE_PATH:
            return f"cannot be read: {error.strerror}"
        raise ShardError(
            f"{sources.folder if gone else path} cannot be read: {error.strerror}. Bring it back "
            "and run the same command again."
        ) from error
