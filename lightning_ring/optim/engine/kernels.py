"""The Triton kernels of LAMB and LARS: one launch over all parameters of one kind.

A step is five launches: the numbers of each parameter (`lamb_scalars`, `lars_scalars`), `sweep` to
measure, `add_up`, the trust ratios (`lamb_rates`, `lars_rates`), and `sweep` to move. They read

    chunks    int64    row, start and size of each chunk, shape [chunks, 3]
    pointers  int64    a row for each parameter: the addresses of weight, gradient, states and
                       mirror, if there is one, and 1 where all of them are multiples of 16
    groups    int64    the group of each parameter
    hyper     float64  a row for each group: the values of `hyperparameters`, in their order
    numbers   float64  a row for each parameter: what `sweep` reads, then what the ratios need
    sums      float64  squares of weights and of directions
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = 11  # of ``numbers``
_COLUMNS = tl.constexpr(COLUMNS)
_HYPER = tl.constexpr(9)


@triton.jit
def _element(  # type: ignore[no-untyped-def]
    at_w, at_g, at_s, at_t, at_mirror, offsets, mask, a, b, c, d, e, f, decay, rate,
    COMPUTE: tl.constexpr, LAMB: tl.constexpr, MOVE: tl.constexpr, MIRROR: tl.constexpr,
):  # fmt: skip
    """Squares of the weight and of the direction of its step, before it is moved."""
    # Triton's interpreter takes long for each function called here.
    w = tl.load(at_w + offsets, mask).to(COMPUTE)
    if LAMB:
        m = tl.load(at_s + offsets, mask).to(COMPUTE)
        v = tl.load(at_t + offsets, mask).to(COMPUTE)
        beta1, beta2, gain1, gain2, root_scale, floor = a, b, c, d, e, f
        if not MOVE:
            g = tl.load(at_g + offsets, mask).to(COMPUTE)
            m = beta1 * m + gain1 * g
            v = beta2 * v + gain2 * g * g
            tl.store(at_s + offsets, m, mask)
            tl.store(at_t + offsets, v, mask)
        x = m / (root_scale * tl.sqrt(v) + floor) + decay * w
        moved = w - rate * x if MOVE else w
    else:
        grad_scale, momentum, ahead, beside, gain = a, b, c, d, rate
        x = grad_scale * tl.load(at_g + offsets, mask).to(COMPUTE)
        moved = w
        if MOVE:
            decayed = x + decay * w
            v = momentum * tl.load(at_s + offsets, mask).to(COMPUTE) + gain * decayed
            tl.store(at_s + offsets, v, mask)
            moved = w - ahead * v - beside * decayed
    if MOVE:
        tl.store(at_w + offsets, moved, mask)
        if MIRROR is not None:
            tl.store(at_mirror + offsets, moved, mask)
    if mask is not None:
        w, x = tl.where(mask, w, 0.0), tl.where(mask, x, 0.0)
    wide_w, wide_x = w.to(tl.float64), x.to(tl.float64)
    return wide_w * wide_w, wide_x * wide_x


@triton.jit
def _address(pointers, column: tl.constexpr, TYPE: tl.constexpr):  # type: ignore[no-untyped-def]
    return tl.load(pointers + column).to(tl.pointer_type(TYPE))


@triton.jit
def sweep(  # type: ignore[no-untyped-def]
    chunks, pointers, numbers, sums,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, COMPUTE: tl.constexpr, MIRROR: tl.constexpr,
    LAMB: tl.constexpr, MOVE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move the weights of one chunk, or bring its state up to date and measure it."""
    chunk = tl.program_id(0)
    row = tl.load(chunks + 3 * chunk)
    start = tl.load(chunks + 3 * chunk + 1)
    # An int32, as CHUNK is: Triton wants both loops' variable to be of one type.
    size = tl.load(chunks + 3 * chunk + 2).to(tl.int32)
    STATES: tl.constexpr = 2 if LAMB else 1
    TENSORS: tl.constexpr = 2 + STATES if MIRROR is None else 3 + STATES
    p = pointers + row * (TENSORS + 1)
    # The sum stands here, not in `_address`: of what a function returns, the hints below are lost.
    w, g = _address(p, 0, WEIGHT) + start, _address(p, 1, GRAD) + start
    s = _address(p, 2, COMPUTE) + start
    t = _address(p, 3, COMPUTE) + start if LAMB else s
    mirror = w if MIRROR is None else _address(p, 2 + STATES, MIRROR) + start
    n = numbers + row * _COLUMNS
    a, b = tl.load(n).to(COMPUTE), tl.load(n + 1).to(COMPUTE)
    c, d = tl.load(n + 2).to(COMPUTE), tl.load(n + 3).to(COMPUTE)
    e, f = tl.load(n + 4).to(COMPUTE), tl.load(n + 5).to(COMPUTE)
    decay, rate = tl.load(n + 6).to(COMPUTE), tl.load(n + 7).to(COMPUTE)
    w_squares, x_squares = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    # Chunks are whole but for the last of each tensor: those need no mask, so that their loads can
    # be 16 bytes wide if the tensors of this parameter begin at such addresses.
    if (size == CHUNK) & (tl.load(p + TENSORS) == 1):
        a_w, a_g, a_s = tl.multiple_of(w, 16), tl.multiple_of(g, 16), tl.multiple_of(s, 16)
        a_t, a_mirror = tl.multiple_of(t, 16), tl.multiple_of(mirror, 16)
        for i in range(0, CHUNK, BLOCK):
            w_square, x_square = _element(
                a_w, a_g, a_s, a_t, a_mirror, i + tl.arange(0, BLOCK), None,
                a, b, c, d, e, f, decay, rate, COMPUTE, LAMB, MOVE, MIRROR,
            )  # fmt: skip
            w_squares += w_square
            x_squares += x_square
    else:
        for i in range(0, size, BLOCK):
            offsets = i + tl.arange(0, BLOCK)
            w_square, x_square = _element(
                w, g, s, t, mirror, offsets, offsets < size,
                a, b, c, d, e, f, decay, rate, COMPUTE, LAMB, MOVE, MIRROR,
            )  # fmt: skip
            w_squares += w_square
            x_squares += x_square
    if not MOVE:
        tl.store(sums + 2 * chunk, tl.sum(w_squares))
        tl.store(sums + 2 * chunk + 1, tl.sum(x_squares))


@triton.jit
def add_up(first_chunk, sums, by_row, num_rows, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of chunks as sums of a row."""
    row = tl.program_id(0)
    begin = tl.load(first_chunk + row)
    end = tl.load(first_chunk + row + 1)
    for column in tl.static_range(2):
        total = tl.zeros([BLOCK], tl.float64)
        for i in range(begin, end, BLOCK):
            chunk = i + tl.arange(0, BLOCK)
            total += tl.load(sums + 2 * chunk + column, mask=chunk < end, other=0.0)
        tl.store(by_row + column * num_rows + row, tl.sum(total))


# -- the numbers of one parameter; its step is the same ``count`` everywhere, or in ``steps``


@triton.jit
def _scale(maximize, clips):  # type: ignore[no-untyped-def]
    scale = 1 - 2 * maximize
    return scale if clips is None else scale / tl.load(clips).to(tl.float64)


@triton.jit
def _correction(is_corrected, beta, step):  # type: ignore[no-untyped-def]
    return tl.where(is_corrected, 1 - tl.exp2(step * tl.log2(beta)), 1.0)


@triton.jit
def lamb_scalars(groups, hyper, steps, count, clips, numbers):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    h = hyper + tl.load(groups + row) * _HYPER
    lr, eps, decay, is_corrected = tl.load(h), tl.load(h + 1), tl.load(h + 2), tl.load(h + 3) != 0
    adapt, beta1, beta2 = tl.load(h + 5), tl.load(h + 6), tl.load(h + 7)
    scale = _scale(tl.load(h + 4), clips)
    # plus 0, which widens a tensor and, under the interpreter, Python's number
    step = tl.zeros((), tl.float64) + (count if steps is None else tl.load(steps + row))
    correction1 = _correction(is_corrected, beta1, step)
    root_scale = correction1 / tl.sqrt(_correction(is_corrected, beta2, step))
    n = numbers + row * _COLUMNS
    tl.store(n, beta1)
    tl.store(n + 1, beta2)
    tl.store(n + 2, (1 - beta1) * scale)
    tl.store(n + 3, (1 - beta2) * scale * scale)
    tl.store(n + 4, root_scale)
    tl.store(n + 5, correction1 * eps)
    tl.store(n + 6, decay)
    tl.store(n + 8, lr)
    tl.store(n + 9, tl.load(h + 8))
    tl.store(n + 10, adapt)


@triton.jit
def lars_scalars(groups, hyper, steps, count, clips, numbers):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    h = hyper + tl.load(groups + row) * _HYPER
    lr, momentum, is_nesterov = tl.load(h), tl.load(h + 1), tl.load(h + 2) != 0
    is_inside = tl.load(h + 8) != 0
    outer = tl.where(is_inside, 1.0, lr)
    n = numbers + row * _COLUMNS
    tl.store(n, _scale(tl.load(h + 6), clips))
    tl.store(n + 1, momentum)
    tl.store(n + 2, tl.where(is_nesterov, outer * momentum, outer))
    tl.store(n + 4, tl.where(is_nesterov, outer, 0.0))
    tl.store(n + 5, tl.where(is_inside, lr, 1.0))
    tl.store(n + 6, tl.load(h + 3))
    tl.store(n + 8, tl.load(h + 4))
    tl.store(n + 9, tl.load(h + 5))
    tl.store(n + 10, tl.load(h + 7))


@triton.jit
def _norms(sums, num_rows):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    return tl.sqrt(tl.load(sums + row)), tl.sqrt(tl.load(sums + num_rows + row))


@triton.jit
def _ratio(ratio, w_norm, norm, n):  # type: ignore[no-untyped-def]
    return tl.where((w_norm > 0) & (norm > 0) & (tl.load(n + 10) != 0), ratio, 1.0)


@triton.jit
def lamb_rates(sums, numbers, ratios, num_rows):  # type: ignore[no-untyped-def]
    n = numbers + tl.program_id(0) * _COLUMNS
    w_norm, norm = _norms(sums, num_rows)
    ratio = tl.minimum(w_norm / norm, tl.load(n + 9), propagate_nan=tl.PropagateNan.ALL)
    ratio = _ratio(ratio, w_norm, norm, n)
    tl.store(n + 7, tl.load(n + 8) * ratio)
    tl.store(ratios + tl.program_id(0), ratio)


@triton.jit
def lars_rates(sums, numbers, ratios, num_rows):  # type: ignore[no-untyped-def]
    n = numbers + tl.program_id(0) * _COLUMNS
    w_norm, norm = _norms(sums, num_rows)
    ratio = tl.load(n + 8) * w_norm / (norm + tl.load(n + 6) * w_norm + tl.load(n + 9))
    ratio = _ratio(ratio, w_norm, norm, n)
    gain = tl.load(n + 5) * ratio
    tl.store(n + 7, gain)
    tl.store(n + 3, tl.load(n + 4) * gain)
    tl.store(ratios + tl.program_id(0), ratio)
