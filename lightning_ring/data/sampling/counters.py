"""Random numbers by position: a counter-based generator, so that any of them is had without those before it."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]  # 32-bit values, held in 64 bits so that their products fit
_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


class Stream(IntEnum):
    """What numbers are drawn for: streams of one seed are independent of each other."""

    ORDER = 1  # which sample stands at a position
    ROUND = 2  # the order of the draws in a round, and of the rounds in an epoch, of balanced sampling
    MEMBERS = 3  # the order of the images of a class
    CROP = 4
    COLOR = 5


def philox(counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words], rounds: int = 10) -> list[Words]:
    """Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), elementwise over arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _MASK, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return [c0, c1, c2, c3]


def words(values: npt.ArrayLike) -> tuple[Words, Words]:
    """Low and high halves of integers that are not negative."""
    whole = np.asarray(values, dtype=np.uint64)
    return whole & _MASK, whole >> _SHIFT


def subkey(seed: int, stream: Stream, a: npt.ArrayLike = 0, b: npt.ArrayLike = 0) -> tuple[Words, Words]:
    """Keys of the generators that ``seed`` has for ``stream`` and each pair of ``a`` and ``b`` (both < 2^48)."""
    a_low, a_high = words(a)
    b_low, b_high = words(b)
    # 16 bits are left of each high half; the stream goes above those of one of them
    mixed = philox((a_low, a_high | np.uint64(stream) << np.uint64(16), b_low, b_high), words(seed))
    return mixed[0], mixed[1]


def uniforms(seed: int, stream: Stream, epoch: int, positions: npt.ArrayLike, num: int) -> npt.NDArray[np.float64]:
    """``num`` numbers in [0, 1) for each of ``positions`` in ``epoch``: ``len(positions) x num``."""
    low, high = words(np.reshape(positions, (-1, 1)))
    block = np.arange((num + 3) // 4, dtype=np.uint64)[None]
    drawn = philox((low, high, block, np.zeros_like(block)), subkey(seed, stream, epoch))
    return np.stack(drawn, axis=-1).reshape(len(low), -1)[:, :num] / 2.0**32
