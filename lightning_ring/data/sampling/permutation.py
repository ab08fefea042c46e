"""Random permutations of which any element is computed by itself: 20 million need neither memory nor time to start."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_ring.data.sampling.counters import Words, philox, words

Ints = npt.NDArray[np.int64]
_FEISTEL_ROUNDS = 6
_PHILOX_ROUNDS = 7  # the fewest that pass BigCrush


def permute(indices: npt.ArrayLike, size: npt.ArrayLike, key: tuple[Words, Words]) -> Ints:
    """Where ``indices`` (each in ``[0, size)``) go under the permutation of ``range(size)`` that ``key`` chooses.

    A Feistel network over Z_a x Z_b, a·b ≥ ``size``, walked until it comes back into the range (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). ``size`` (< 2^62) and ``key`` may differ from element to element.
    """
    values = np.array(indices, dtype=np.int64)
    shape = values.shape
    values = values.reshape(-1)
    sizes = np.broadcast_to(np.asarray(size, dtype=np.int64), shape).reshape(-1)
    k0, k1 = (np.broadcast_to(part, shape).reshape(-1) for part in key)
    rows = np.ceil(np.sqrt(sizes)).astype(np.int64)
    columns = -(-sizes // np.maximum(rows, 1))
    outside = np.arange(len(values))
    while len(outside):
        here = slice(None) if len(outside) == len(values) else outside
        values[here] = _feistel(values[here], rows[here], columns[here], (k0[here], k1[here]))
        outside = outside[values[here] >= sizes[here]]
    return values.reshape(shape)


def _feistel(values: Ints, rows: Ints, columns: Ints, key: tuple[Words, Words]) -> Ints:
    row, column = np.divmod(values, columns)
    for turn in range(0, _FEISTEL_ROUNDS, 2):
        row = (row + _mix(column, turn, key)) % rows
        column = (column + _mix(row, turn + 1, key)) % columns
    return row * columns + column


def _mix(values: Ints, turn: int, key: tuple[Words, Words]) -> Ints:
    low, high = words(values)
    zero = np.zeros((), dtype=np.uint64)
    return philox((low, high, zero + np.uint64(turn), zero), key, _PHILOX_ROUNDS)[0].astype(np.int64)
