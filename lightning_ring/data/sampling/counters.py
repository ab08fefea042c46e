"""Random numbers and random permutations whose elements can be computed one by one
(counter-based generators).
"""

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
    """The purpose of random numbers; streams of one seed are independent of each other."""

    ORDER = 1  # which sample stands at a position
    # the order of the draws in a round, and of the rounds in an epoch, of balanced sampling
    ROUND = 2
    MEMBERS = 3  # the order of the images of a class
    CROP = 4
    COLOR = 5
    SAMPLE = 6  # a seed for the transform of each image
    BATCH = 7  # and of each batch


def philox(
    counter: tuple[Words, Words, Words, Words], key: tuple[Words, Words], rounds: int = 10
) -> list[Words]:
    """Philox4x32 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
    elementwise over arrays.
    """
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


def subkey(
    seed: int, stream: Stream, a: npt.ArrayLike = 0, b: npt.ArrayLike = 0
) -> tuple[Words, Words]:
    """Keys of the generators that ``seed`` has for ``stream`` and each pair of ``a`` and ``b``
    (both < 2^48).
    """
    low, high = words(a)
    # 16 bits are left of each high half; the stream goes above those of one of them
    high = high | np.uint64(stream) << np.uint64(16)
    mixed = philox((low, high, *words(b)), words(seed))
    return mixed[0], mixed[1]


def integers(seed: int, stream: Stream, epoch: int, positions: npt.ArrayLike, num: int) -> Words:
    """``num`` numbers in [0, 2^32) for each of ``positions`` in ``epoch``: ``len(positions) x
    num``.
    """
    rows, blocks = np.reshape(positions, (-1, 1)), np.arange((num + 3) // 4)
    drawn = philox((*words(rows), *words(blocks)), subkey(seed, stream, epoch))
    return np.stack(drawn, axis=-1).reshape(len(rows), -1)[:, :num]


def uniforms(
    seed: int, stream: Stream, epoch: int, positions: npt.ArrayLike, num: int
) -> npt.NDArray[np.float64]:
    """``num`` numbers in [0, 1) for each of ``positions`` in ``epoch``: ``len(positions) x
    num``.
    """
    return integers(seed, stream, epoch, positions, num) / 2.0**32


Ints = npt.NDArray[np.int64]
_FEISTEL_ROUNDS = 6
_PHILOX_ROUNDS = 7  # the fewest that pass BigCrush


def permute(indices: npt.ArrayLike, size: npt.ArrayLike, key: tuple[Words, Words]) -> Ints:
    """Where ``indices`` (1-D, in ``[0, size)``) go under the permutation of ``range(size)`` that
    ``key`` chooses.

    A Feistel network over Z_a x Z_b, a·b ≥ ``size``, walked until it comes back into the range
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). ``size`` (< 2^62) and ``key``
    may differ from element to element.
    """
    values = np.array(indices, dtype=np.int64)
    sizes = np.broadcast_to(np.asarray(size, dtype=np.int64), values.shape)
    k0, k1 = (np.broadcast_to(part, values.shape) for part in key)
    rows = np.ceil(np.sqrt(sizes)).astype(np.int64)
    columns = -(-sizes // np.maximum(rows, 1))
    outside = np.arange(len(values))
    while len(outside):
        here = slice(None) if len(outside) == len(values) else outside
        values[here] = _feistel(values[here], rows[here], columns[here], (k0[here], k1[here]))
        outside = outside[values[here] >= sizes[here]]
    return values


def _feistel(values: Ints, rows: Ints, columns: Ints, key: tuple[Words, Words]) -> Ints:
    row, column = np.divmod(values, columns)
    for turn in range(0, _FEISTEL_ROUNDS, 2):
        row = (row + _mix(column, turn, key)) % rows
        column = (column + _mix(row, turn + 1, key)) % columns
    return row * columns + column


def _mix(values: Ints, turn: int, key: tuple[Words, Words]) -> Ints:
    mixed = philox((*words(values), *words(turn)), key, _PHILOX_ROUNDS)
    return mixed[0].astype(np.int64)
