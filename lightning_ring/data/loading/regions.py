"""The part of a JPEG that a crop needs, without decoding the rest: for JPEGs with restart markers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_DRI = b"\xff\xdd\x00\x04"
_SOS = b"\xff\xda"
_SEGMENT = Struct(">xBH")  # marker, length
_SIZE = Struct(">HH")  # height, width
_END = 0xD9
_RESTARTS = np.tile(np.arange(0xD0, 0xD8, dtype=np.uint8), 512)
_HEADER = 16384  # bytes in which a restart interval is looked for: after colour profile and EXIF it would not pay


@dataclass(frozen=True, slots=True)
class RestartGrid:
    """The restart intervals of a baseline JPEG with one scan, as a grid: they are coded independently."""

    height: int  # of the image, in pixels
    width: int
    frame: int  # offset of height and width in the file
    scan: int  # offset of the first coded byte
    unit_height: int  # pixels of an interval; the last of a row or column may be smaller
    unit_width: int
    down: int  # number of intervals
    across: int


class Cut(NamedTuple):
    """A JPEG of ``height`` x ``width`` pixels, in which the rectangle asked for begins at ``top`` and ``left``."""

    data: bytearray
    top: int
    left: int
    height: int
    width: int


def read_layout(data: bytes) -> RestartGrid | None:
    """`None`: there are no restart markers, or not where rows and columns could be cut, or it is no baseline JPEG."""
    restarts = data.find(_DRI, 0, _HEADER)
    scan = data.find(_SOS, restarts, 2 * _HEADER) if restarts > 0 else -1
    return _layout(data[: scan + 5]) if scan > 0 else None


@lru_cache(maxsize=1024)  # images of one size that one program wrote have the same header
def _layout(header: bytes) -> RestartGrid | None:
    at, frame, block, interval = 2, 0, (8, 8), 0
    while at + 5 <= len(header) and header[at] == 0xFF:
        marker, length = _SEGMENT.unpack_from(header, at)
        if marker in (0xC0, 0xC1):
            if at + 2 + length > len(header) or length < 11:
                return None
            frame, num = at + 5, header[at + 9]
            factors = header[at + 11 : at + 2 + length : 3]
            if num > 1:  # with one component, intervals are counted in blocks of 8 x 8
                block = 8 * max(factor & 15 for factor in factors), 8 * max(factor >> 4 for factor in factors)
        elif marker == 0xDD:
            interval = header[at + 4] << 8 | header[at + 5]
        elif marker == 0xDA:
            whole = frame and header[at + 4] == header[frame + 4]  # all components in this scan
            return _grid(header, frame, at + 2 + length, block, interval) if whole else None
        elif 0xC2 <= marker <= 0xCF and marker != 0xC4:
            return None  # progressive, lossless or arithmetic
        at += 2 + length
    return None


def _grid(header: bytes, frame: int, scan: int, block: tuple[int, int], interval: int) -> RestartGrid | None:
    height, width = _SIZE.unpack_from(header, frame)
    if 0 in (height, width, interval, *block):
        return None
    columns = -(-width // block[1])
    if columns % interval and interval % columns:
        return None
    wide, high = min(interval, columns) * block[1], max(1, interval // columns) * block[0]
    return RestartGrid(height, width, frame, scan, high, wide, -(-height // high), -(-width // wide))


def cut(data: bytes, layout: RestartGrid, top: int, left: int, height: int, width: int) -> Cut | None:
    """A smaller JPEG that decodes to the very pixels of ``data`` in the rectangle given; the rectangle's place in it.

    Intervals outside are left out, the markers between the others are numbered anew (ITU-T T.81, B.2.1), and the header
    states the new size. One pixel around the rectangle is kept: chroma is interpolated over the edges of intervals.

    Returns:
        `None` where nothing can be left out, or markers are not where the header says.
    """
    across = layout.across
    first, last = _span(top, height, layout.unit_height, layout.down)
    start, stop = _span(left, width, layout.unit_width, across)
    if (last - first) * (stop - start) == layout.down * across:
        return None
    marks = _marks(data, layout)
    if marks is None:
        return None
    kept = marks[1:].reshape(-1, across)[first:last, start:stop]
    begins = marks[first * across + start : last * across : across] + 2
    ends = kept[:, -1] + 2
    pieces = [data[: layout.scan]]
    pieces += [data[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    smaller = bytearray().join(pieces)
    lengths = ends - begins
    places = kept + (lengths.cumsum() - lengths - begins + (layout.scan + 1))[:, None]
    np.frombuffer(smaller, dtype=np.uint8)[places.ravel()] = _restarts(places.size)
    smaller[-1] = _END
    y, x = first * layout.unit_height, start * layout.unit_width
    bottom, right = min(last * layout.unit_height, layout.height), min(stop * layout.unit_width, layout.width)
    _SIZE.pack_into(smaller, layout.frame, bottom - y, right - x)
    return Cut(smaller, top - y, left - x, bottom - y, right - x)


def _span(start: int, length: int, unit: int, num: int) -> tuple[int, int]:
    """Intervals, from the first to the one after the last."""
    first, stop = max(0, (start - 1) // unit), min((start + length) // unit + 1, num)
    # not a narrow last one alone: chroma of one or two pixels is interpolated by another rule
    return max(0, min(first, num - 2)) if stop == num else first, stop


def _marks(data: bytes, layout: RestartGrid) -> npt.NDArray[np.int64] | None:
    """Offset of the marker after each interval, in the file's order, behind that of the one before the first."""
    num = layout.down * layout.across
    coded = np.frombuffer(data, dtype=np.uint8)
    head, tail = coded[layout.scan : -1], coded[layout.scan + 1 :]
    found = ((head == 0xFF) > (tail == 0)).nonzero()[0][:num]  # before 0 it is a coded byte, no marker
    codes = tail.take(found)
    if len(found) < num or codes[-1] != _END or (codes[:-1] != _restarts(num - 1)).any():
        return None
    marks = np.empty(num + 1, dtype=np.int64)
    marks[0] = layout.scan - 2
    np.add(found, layout.scan, out=marks[1:])
    return marks


def _restarts(num: int) -> npt.NDArray[np.uint8]:
    return _RESTARTS[:num] if num <= len(_RESTARTS) else np.resize(_RESTARTS, num)
