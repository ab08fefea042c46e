"""Decoding, cropping and device transforms, against torchvision and Pillow."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close

from lightning_ring.data import CenterCrop, DeviceTransform, RandomResizedCrop
from lightning_ring.data.decoding import decode_rgb
from lightning_ring.data.loading.transforms import Box, decode_into, height_and_width
from lightning_ring.data.sampling.counters import Stream, uniforms
from lightning_ring.errors import ConfigurationError
from tests.data.photos import encode
from tests.images import picture

transforms = pytest.importorskip("torchvision.transforms.v2")
functional = transforms.functional


def jpeg(height, width):
    return encode(Image.fromarray(picture(0, height, width)), quality=92)


class Fixed:
    num_uniforms = 0

    def __init__(self, box, size, exact=True):
        self.fixed = box
        self.size = size
        self.exact = exact

    def box(self, height, width, uniforms):
        return self.fixed


def cropped(data, crop, numbers=()):
    out = torch.empty(1, *height_and_width(crop.size), 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    decode_into(out, data, crop, numbers)
    return out[0]


def reference(data, box, size):
    image = torch.from_numpy(decode_rgb(data)).permute(2, 0, 1)
    part = functional.resized_crop(image, *box[:4], list(height_and_width(size)), antialias=True)
    return functional.horizontal_flip(part) if box.flip else part


@pytest.mark.parametrize(
    "box",
    [
        Box(3, 5, 130, 150, False),
        Box(0, 0, 256, 341, True),
        Box(9, 17, 224, 224, True),
        Box(40, 11, 60, 99, True),
        Box(0, 0, 1, 1, False),
    ],
)
def test_it_equals_torchvision_bit_for_bit(box):
    data = jpeg(256, 341)
    for size in (224, (96, 160), (300, 64)):
        assert torch.equal(cropped(data, Fixed(box, size)), reference(data, box, size))


@pytest.mark.parametrize(
    ("box", "factor"), [(Box(12, 8, 400, 500, True), 4), (Box(0, 0, 704, 896, False), 8)]
)
def test_what_is_decoded_smaller_stays_close_to_torchvision(box, factor):
    data, size = jpeg(704, 896), box.height // (2 * factor) + 1
    image, expected = (
        cropped(data, Fixed(box, size, exact=False)).float(),
        reference(data, box, size).float(),
    )
    difference = (image - expected).abs()
    assert 0 < difference.mean() < 1.5  # not 0: it was decoded smaller
    assert difference.flatten()[::7].quantile(0.999) < 8
    assert torch.equal(cropped(data, Fixed(box, size)), reference(data, box, size))


def test_images_that_simplejpeg_cannot_read():
    pixels = picture(1, 40, 60)
    image, box = Image.fromarray(pixels), Fixed(Box(0, 0, 40, 60, False), 32)
    exact = reference(encode(image, "PNG"), box.fixed, 32)
    assert torch.equal(cropped(encode(image, "PNG"), box), exact)
    for data in (
        encode(image.convert("CMYK")),
        encode(image.convert("RGBA"), "PNG"),
        encode(image, "WEBP", lossless=True),
        encode(image, "BMP"),
    ):
        assert (cropped(data, box).float() - exact.float()).abs().mean() < 4
    deep = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
    shown = cropped(encode(deep, "PNG"), box)
    assert torch.equal(shown, exact[:1].expand_as(shown))
    for gray in ("JPEG", "PNG"):
        shown = cropped(encode(image.convert("L"), gray), box)
        assert torch.equal(shown[0], shown[2])


@pytest.mark.parametrize(
    "data",
    [b"", b"hello, this is text", jpeg(64, 64)[:900], jpeg(64, 64)[:20]],
    ids=["empty", "text", "cut", "header"],
)
def test_what_is_no_image_raises(data):
    with pytest.raises((ValueError, OSError)):
        cropped(data, RandomResizedCrop(32), [0.5] * 23)


def test_every_damage_is_a_value_error():
    image = Image.new("RGB", (40, 30))
    png, bmp = (bytearray(encode(image, kind)) for kind in ("PNG", "BMP"))
    at = png.index(b"IDAT")
    # so that the next chunk has no name; Pillow: SyntaxError
    png[at - 4 : at] = (2).to_bytes(4, "big")
    bmp[18:26] = bytes([0, 0, 1, 0] * 2)  # width and height; Pillow: DecompressionBombError
    for data in (png, bmp):
        with pytest.raises(ValueError, match=r"SyntaxError|DecompressionBombError"):
            decode_rgb(bytes(data))


def test_a_center_larger_than_the_image_is_an_error():
    with pytest.raises(
        ConfigurationError, match="cannot cut 288 pixels out of a shorter side resized to 256"
    ):
        CenterCrop(288, 256)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (37, 53), (480, 640)])
def test_boxes_lie_inside(size):
    for crop in (RandomResizedCrop(16), CenterCrop(16, 20)):
        for numbers in [
            *uniforms(0, Stream.CROP, 0, np.arange(200), 23).tolist(),
            [0.0] * 23,
            [1 - 2**-32] * 23,
        ]:
            top, left, height, width, _ = crop.box(*size, numbers)
            assert top >= 0 <= left
            assert height >= 1 <= width
            assert top + height <= size[0]
            assert left + width <= size[1]


@pytest.mark.parametrize("size", [(256, 341), (100, 600)])
def test_boxes_are_distributed_as_torchvision_draws_them(size):
    num, crop = 3000, RandomResizedCrop()
    ours = np.array(
        [crop.box(*size, row) for row in uniforms(0, Stream.CROP, 0, np.arange(num), 23).tolist()],
        float,
    )
    torch.manual_seed(0)
    image, theirs = torch.empty(3, *size), transforms.RandomResizedCrop(224)
    drawn = [theirs.make_params([image]) for _ in range(num)]
    expected = np.array(
        [[d[name] for name in ("top", "left", "height", "width")] for d in drawn], float
    )
    for column in range(4):
        points = np.quantile(expected[:, column], [0.05, 0.25, 0.5, 0.75, 0.95])
        for point in points:
            assert (
                abs((ours[:, column] <= point).mean() - (expected[:, column] <= point).mean())
                < 0.05
            )
    assert abs(ours[:, 4].mean() - 0.5) < 0.04


def test_center_crop_is_resize_and_crop():
    data = jpeg(300, 400)
    image = torch.from_numpy(decode_rgb(data)).permute(2, 0, 1)
    expected = functional.center_crop(
        functional.resize(image, [256], antialias=True), [224]
    ).float()
    assert (cropped(data, CenterCrop(224, 256)).float() - expected).abs().mean() < 3


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_normalisation(memory_format):
    images = torch.randint(0, 256, (3, 3, 20, 24), dtype=torch.uint8).contiguous(
        memory_format=memory_format
    )
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    expected = functional.normalize(
        functional.to_dtype(images, torch.float32, scale=True), mean, std
    )
    done = DeviceTransform(mean, std)(images)
    assert_close(done, expected, atol=1e-6, rtol=1e-5)
    assert done.is_contiguous(memory_format=torch.channels_last)
    half = DeviceTransform(mean, std, dtype=torch.bfloat16)(images)
    assert half.dtype == torch.bfloat16
    assert_close(half.float(), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_change_as_in_torchvision(name):
    images = torch.randint(0, 256, (4, 3, 20, 24), dtype=torch.uint8).contiguous(
        memory_format=torch.channels_last
    )
    numbers = torch.rand(4, 3)
    done = DeviceTransform([0, 0, 0], [1, 1, 1], **{name: 0.6})(images, numbers)
    column = ["brightness", "contrast", "saturation"].index(name)
    for i in range(4):
        factor = 0.4 + 1.2 * float(numbers[i, column])
        adjust = getattr(functional, f"adjust_{name}")
        expected = adjust(functional.to_dtype(images[i], torch.float32, scale=True), factor)
        assert_close(done[i], expected, atol=2e-3, rtol=0)
