"""Parts of JPEGs with restart markers: the pixels of a whole decoding, out of fewer bytes."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from PIL import Image

from lightning_ring.data import RandomResizedCrop
from lightning_ring.data.loading.pixels import choose_part, decode_part_into
from lightning_ring.data.loading.regions import cut, read_layout
from lightning_ring.data.loading.transforms import Box
from lightning_ring.data.packing.image import encode_jpeg
from lightning_ring.data.sampling.counters import Stream, uniforms
from tests.images import picture

CROP = RandomResizedCrop(64, scale=(0.01, 0.9))


def encode(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
    file = BytesIO()
    Image.fromarray(picture(height + width, height, width)).convert(mode).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def boxes(height: int, width: int, num: int = 30) -> list[Box]:
    drawn = uniforms(0, Stream.CROP, 0, np.arange(num), CROP.num_uniforms).tolist()
    edges = [(0, 0, 1, 1), (0, width - 1, 1, 1), (height - 1, width - 1, 1, 1), (height - 1, 0, 1, 1)]
    return [CROP.box(height, width, row) for row in drawn] + [Box(*edge, False) for edge in edges]


def decoded_into(data: bytes, numbers: list[float], size: int) -> torch.Tensor:
    out = torch.empty(1, size, size, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    crop = RandomResizedCrop(size)
    decode_part_into(out, choose_part(data, crop, numbers), crop, numbers)
    return out


@pytest.mark.parametrize("interval", [1, 2, 4, 0])  # 0: one marker a row, or two rows
@pytest.mark.parametrize("subsampling", ["4:2:0", "4:2:2", "4:4:4", "gray"])
@pytest.mark.parametrize("size", [(130, 253), (97, 256), (17, 33)])
def test_a_part_has_the_pixels_of_the_whole(size: tuple[int, int], subsampling: str, interval: int) -> None:
    height, width = size
    restarts = {"restart_marker_blocks": interval} if interval else {"restart_marker_rows": 2 if height > 100 else 1}
    if subsampling == "gray":
        data, colors = encode(height, width, "L", **restarts), "GRAY"
    else:
        data, colors = encode(height, width, subsampling=subsampling, **restarts), "RGB"
    layout = read_layout(data)
    block = 8 if subsampling in ("gray", "4:4:4") else 16
    if interval and -(-width // block) % interval and interval % -(-width // block):
        assert layout is None  # rows do not begin with an interval
        return
    assert layout is not None
    assert (layout.height, layout.width) == size
    whole, num_cut = simplejpeg.decode_jpeg(data, colors), 0
    for top, left, h, w, _ in boxes(height, width):
        smaller = cut(data, layout, top, left, h, w)
        if smaller is None:
            continue
        num_cut += 1
        part = simplejpeg.decode_jpeg(smaller.data, colors, strict=True)  # strict: no marker is out of its turn
        assert part.shape[:2] == smaller[3:]
        assert len(smaller.data) < len(data)
        assert np.array_equal(part[smaller.top :, smaller.left :][:h, :w], whole[top : top + h, left : left + w])
    assert num_cut > 20 or height == 17


def test_what_is_left_out_is_what_the_part_does_not_need() -> None:
    data = encode_jpeg(Image.fromarray(picture(0, 256, 352)), 90)
    layout = read_layout(data)
    assert layout is not None
    assert (layout.unit_height, layout.unit_width, layout.down, layout.across) == (16, 32, 16, 11)
    smaller = cut(data, layout, 33, 65, 30, 30)  # rows 33 to 62, columns 65 to 94, and a pixel on each side
    assert smaller is not None
    assert smaller[1:] == (33 - 32, 65 - 64, 32, 32)
    assert cut(data, layout, 0, 0, 256, 352) is None
    assert cut(data, layout, 16, 32, 230, 300) is None  # all intervals are touched


@pytest.mark.parametrize("size", [64, 20])  # 20: decoded at a half
def test_markers_change_no_crop(size: int) -> None:
    image = Image.fromarray(picture(3, 200, 301))
    plain, marked = BytesIO(), encode_jpeg(image, 90)
    image.save(plain, "JPEG", quality=90)
    assert read_layout(plain.getvalue()) is None
    for row in uniforms(1, Stream.CROP, 0, np.arange(20), 23).tolist():
        assert torch.equal(decoded_into(marked, row, size), decoded_into(plain.getvalue(), row, size))


def test_packed_jpegs_hold_the_same_pixels_with_markers_and_nothing_of_the_file_that_was() -> None:
    image = Image.fromarray(picture(4, 100, 160))
    image.info["comment"] = b"taken at home"
    for mode, colors, intervals in (("RGB", "RGB", (7, 5)), ("L", "GRAY", (13, 1))):
        data, plain = encode_jpeg(image.convert(mode), 90), BytesIO()
        image.convert(mode).save(plain, "JPEG", quality=90)
        layout = read_layout(data)
        assert layout is not None
        assert (layout.down, layout.across) == intervals
        assert np.array_equal(simplejpeg.decode_jpeg(data, colors), simplejpeg.decode_jpeg(plain.getvalue(), colors))
        assert b"taken at home" not in data


def test_an_odd_number_of_blocks_has_a_marker_after_each() -> None:
    layout = read_layout(encode_jpeg(Image.fromarray(picture(4, 100, 161)), 90))
    assert layout is not None
    assert (layout.unit_width, layout.across) == (16, 11)


def test_jpegs_that_cannot_be_cut_are_decoded_whole() -> None:
    assert read_layout(encode(60, 80)) is None  # no markers
    assert read_layout(encode(60, 80, progressive=True, restart_marker_blocks=1)) is None
    assert read_layout(encode(60, 80, restart_marker_blocks=3)) is None  # five blocks a row
    assert read_layout(b"\xff\xd8" + b"\xff\xdd\x00\x04\x00\x01" * 3 + b"\xff\xda") is None
    for row in uniforms(2, Stream.CROP, 0, np.arange(4), 23).tolist():
        assert torch.equal(
            decoded_into(encode(60, 80, progressive=True, restart_marker_blocks=1), row, 32),
            decoded_into(encode(60, 80, progressive=True), row, 32),
        )


def test_markers_that_are_not_where_they_should_be() -> None:
    data = encode(60, 80, restart_marker_blocks=1)
    layout = read_layout(data)
    assert layout is not None
    at = data.index(b"\xff\xd3", layout.scan)
    part = 0, 0, 10, 10
    assert cut(data, layout, *part) is not None
    assert cut(data + b"\xff\xd3 something after the end", layout, *part) is not None
    assert cut(data[:at] + data[at + 2 :], layout, *part) is None  # missing
    assert cut(data[:at] + b"\xff\xd4" + data[at + 2 :], layout, *part) is None  # out of turn
    assert cut(data[:-2], layout, *part) is None  # cut short
    assert cut(data[: layout.scan + 1], layout, *part) is None
    for broken in (data[: len(data) // 2], data[: layout.scan + 1], data[:at]):
        with pytest.raises((ValueError, OSError)):
            decoded_into(broken, [0.5] * 23, 32)


@pytest.mark.parametrize("end", range(2, 700, 9))
def test_a_header_that_is_cut_short_raises_what_others_raise(end: int) -> None:
    with pytest.raises((ValueError, OSError)):
        decoded_into(encode(60, 80, restart_marker_blocks=1)[:end], [0.5] * 23, 32)
