"""One image on its way into a shard."""

import numpy as np
import pytest
from PIL import Image, ImageOps

from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.packing.image import PackSettings, prepare_image
from tests.data.photos import EXIF_ORIENTATION, decode, encode, photo

SIXTEEN_BITS = Image.fromarray(np.linspace(0, 65535, 120 * 80).reshape(80, 120).astype(np.uint16))
PALETTE = photo().convert("P")


def distance(a, b):
    """Mean difference of two images, in levels of 255."""
    assert a.size == b.size
    return float(
        np.abs(
            np.asarray(a.convert("RGB"), np.float32) - np.asarray(b.convert("RGB"), np.float32)
        ).mean()
    )


@pytest.mark.parametrize(
    ("data", "extension"),
    [
        (encode(photo()), "jpg"),
        (encode(photo(), progressive=True), "jpg"),
        (encode(photo().convert("L")), "jpg"),
        (encode(photo(), "PNG"), "png"),
        (encode(photo().convert("L"), "PNG"), "png"),
        (encode(photo().convert("RGBA"), "PNG"), "png"),
        (encode(PALETTE, "PNG"), "png"),
        (encode(photo(), "WEBP"), "webp"),
    ],
)
@pytest.mark.parametrize("size", [80, 100, 0])
def test_small_images_are_copied_byte_for_byte(data, extension, size):
    packed = prepare_image(data, PackSettings(size, quality=90))
    assert (packed.data, packed.extension, packed.how, packed.note) == (
        data,
        extension,
        "copied",
        "",
    )


@pytest.mark.parametrize(
    ("width", "height", "expected"),
    [(120, 80, (60, 40)), (81, 197, (40, 97)), (400, 41, (390, 40))],
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_shorter_side_is_shrunk(width, height, expected, mode):
    original = photo(1, width, height).convert(mode)
    packed = prepare_image(encode(original), PackSettings(40, quality=95))
    assert (packed.extension, packed.how, packed.note) == ("jpg", "shrunk", "")
    result = decode(packed.data)
    assert (result.size, result.mode) == (expected, mode)
    assert distance(result, original.resize(expected, Image.Resampling.BICUBIC)) < 4


@pytest.mark.parametrize("size", [40, 0])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(orientation, size):
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = orientation
    data = encode(photo(2), exif=exif)
    packed = prepare_image(data, PackSettings(size, quality=95, upright=True))
    result, expected = decode(packed.data), ImageOps.exif_transpose(decode(data))
    if orientation == 1 and not size:
        assert packed.data == data
        return
    assert packed.how == ("shrunk" if size else "turned")
    assert result.getexif().get(EXIF_ORIENTATION, 1) == 1
    assert distance(result, expected.resize(result.size, Image.Resampling.BICUBIC)) < 4


@pytest.mark.parametrize(
    ("data", "note"),
    [
        (encode(photo().convert("CMYK")), "CMYK to RGB"),
        (encode(SIXTEEN_BITS, "PNG"), "16-bit gray to 8"),
        (encode(SIXTEEN_BITS, "TIFF"), "TIFF to JPEG; 16-bit gray to 8"),
        (encode(photo(), "BMP"), "BMP to JPEG"),
        (encode(photo(), "PNG", save_all=True, append_images=[photo(1)]), "the first of 2 frames"),
    ],
)
def test_conversions_are_named_and_keep_the_picture(data, note):
    expected = (
        Image.fromarray((np.asarray(SIXTEEN_BITS) >> 8).astype(np.uint8))
        if "16-bit" in note
        else photo()
    )
    packed = prepare_image(data, PackSettings(0, quality=95))
    assert (packed.how, packed.note) == ("converted", note)
    assert distance(decode(packed.data), expected) < 3


def test_a_damaged_jpeg_that_pillow_reads_is_encoded_anew():
    data = bytearray(encode(photo(3, 200, 200)))
    data[len(data) // 2 : len(data) // 2 + 4] = b"\xff\xd9\xff\xd9"
    packed = prepare_image(bytes(data), PackSettings(0, quality=90))
    assert packed.how == "converted"
    assert packed.note.startswith("damaged JPEG, as Pillow reads it")
    decode_rgb(packed.data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(photo())[:700], "truncated"),
        (encode(photo())[:-2], "truncated"),
        (encode(photo(), "PNG")[:-60], "truncated"),
        (b"", "the file is empty"),
        (b"just some text", "not an image; it starts with b'just some te'"),
        (encode(photo().convert("F"), "TIFF"), "pixels of mode F have no known range"),
        (encode(photo().convert("I"), "TIFF"), "pixels of mode I have no known range"),
    ],
)
@pytest.mark.parametrize("size", [0, 20])
def test_unusable_images_say_why(data, reason, size):
    assert reason in prepare_image(data, PackSettings(size, quality=90))


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("PNG", "L"), ("PNG", "P")],
)
def test_decoding_gives_pillows_pixels(kind, mode):
    data = encode(photo(5).convert(mode), kind)
    pixels = decode_rgb(data)
    assert pixels.shape == (80, 120, 3)
    assert pixels.flags.writeable
    assert distance(Image.fromarray(pixels), decode(data)) < (1.5 if mode == "CMYK" else 0.5)
