"""The source of the CUDA kernels: a rule's arithmetic in Triton programs over many tensors."""

from __future__ import annotations

import linecache
from typing import Any

import torch

from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.rule import Rule
from lightning_ring.optim.engine.trace import (
    Body,
    element_types,
    measure_body,
    move_body,
    number_names,
    rates_body,
    scalars_body,
)

CHUNK = 1 << 14  # elements of one program
NUM_WARPS = 8
# Bytes that a program works on at a time of the widest tensor it loads: 16 for each of its threads,
# which is one load. With 32, LAMB's `measure` needs 106 to 118 registers, and two programs fit a
# multiprocessor of an A100 or H100; with 16 it needs 48, and five fit.
BLOCK_BYTES = 16 * 32 * NUM_WARPS

TRITON_TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}

PRELUDE = """
import triton
import triton.language as tl


@triton.jit
def sqrt(x):
    return tl.sqrt(x)


@triton.jit
def power(base, exponent):
    return tl.exp2(exponent * tl.log2(base))


@triton.jit
def where(condition, x, y):
    return tl.where(condition, x, y)


@triton.jit
def minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def number(value: tl.constexpr):
    return tl.full((), value, tl.float64)


@triton.jit
def add_up(first_chunk, sums, by_row, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    begin = tl.load(first_chunk + row)
    end = tl.load(first_chunk + row + 1)
    for column in tl.static_range(2):
        total = tl.zeros([BLOCK], tl.float64)
        for i in range(begin, end, BLOCK):
            chunk = i + tl.arange(0, BLOCK)
            total += tl.load(sums + 2 * chunk + column, mask=chunk < end, other=0.0)
        tl.store(by_row + column * num_rows + row, tl.sum(total))
"""

# Chunks are whole but for the last of each tensor: those need no mask, so that their loads can be
# 16 bytes wide if the tensors of this parameter begin at such addresses. The size is an int32, as
# the other branch's CHUNK is: Triton wants both loops' variable to be of one type.
FUNCTION = """

@triton.jit
def {name}(chunks, pointers, numbers, {sums}CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    row = tl.load(chunks + 3 * chunk)
    start = tl.load(chunks + 3 * chunk + 1)
    size = tl.load(chunks + 3 * chunk + 2).to(tl.int32)
{setup}
    aligned = tl.load(pointers + row * {width} + {width} - 1)
    if (size == CHUNK) & (aligned == 1):
{hints}
        for i in range(0, CHUNK, BLOCK):
            offsets = i + tl.arange(0, BLOCK)
{whole}
    else:
        for i in range(0, size, BLOCK):
            offsets = i + tl.arange(0, BLOCK)
            mask = offsets < size
{masked}
{after}
"""

# A program each for the numbers of one parameter. ``hyper`` has a row for each group, ``numbers``
# one for each parameter. The step is the same ``count`` everywhere, or in ``steps``.
SCALARS = """

@triton.jit
def scalars(groups, hyper, steps, count, clips, numbers):
    row = tl.program_id(0)
    group = tl.load(groups + row)
    clip = number(1.0) if clips is None else tl.load(clips).to(tl.float64)
{lines}
"""

RATES = """

@triton.jit
def rates(sums, numbers, ratios, num_rows):
    row = tl.program_id(0)
    w_squares = tl.load(sums + row)
    x_squares = tl.load(sums + num_rows + row)
{lines}
"""


def compile_module(rule: type[Rule], kind: TensorKind) -> dict[str, Any]:
    """The Triton functions ``scalars``, ``measure``, ``add_up``, ``rates`` and ``move``.

    ``pointers`` has a row for each parameter: the addresses of its `element_types`, and whether
    they are aligned.
    """
    types, compute = element_types(rule, kind, TRITON_TYPES)
    names = number_names(rule)
    measure = _function("measure", measure_body(rule), names, types, compute)
    move = _function("move", move_body(rule), names, types, compute)
    text = PRELUDE + _scalars(rule, names) + measure + _rates(rule, names) + move
    filename = f"<lightning_ring {rule.__name__} {kind.weight} {kind.grad} {kind.mirror}>"
    # Triton reads it there
    linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module: dict[str, Any] = {"__name__": f"{__name__}.generated"}
    exec(compile(text, filename, "exec"), module)
    return module


def block_size(body: Body, kind: TensorKind) -> int:
    """Elements that a program works on at a time, a power of two."""
    dtypes = {"w": kind.weight, "g": kind.grad}
    return BLOCK_BYTES // max(dtypes.get(name, kind.compute).itemsize for name in body.loads)


def _scalars(rule: type[Rule], names: tuple[str, ...]) -> str:
    body = scalars_body(rule)
    lines = _loads("hyper + group", body.scalars, body.scalars)
    if rule.counts_steps:
        # times 1, which widens a tensor and, under the interpreter, Python's number
        lines.append("step = number(1.0) * (count if steps is None else tl.load(steps + row))")
    return SCALARS.format(lines=_indent(lines + _stores(body, names), 4))


def _rates(rule: type[Rule], names: tuple[str, ...]) -> str:
    body = rates_body(rule)
    lines = _loads("numbers + row", body.scalars, names) + _stores(body, names)
    lines.append(f"tl.store(ratios + row, {body.result})")
    return RATES.format(lines=_indent(lines, 4))


def _loads(row: str, names: tuple[str, ...], columns: tuple[str, ...]) -> list[str]:
    return [f"h_{name} = tl.load({row} * {len(columns)} + {columns.index(name)})" for name in names]


def _stores(body: Body, columns: tuple[str, ...]) -> list[str]:
    """The statements of ``body``, and the stores of what they compute."""
    statements = [f"{name} = {expression}" for name, expression in body.statements]
    return statements + [
        f"tl.store(numbers + row * {len(columns)} + {columns.index(name)}, {value})"
        for name, value in body.stores
    ]


def _function(
    name: str, body: Body, numbers: tuple[str, ...], types: dict[str, str], compute: str
) -> str:
    stored = dict(body.stores)
    if name == "move" and "mirror" in types:
        stored["mirror"] = stored["w"]
    setup, hints = [], []
    for column, (element, kind) in enumerate(types.items()):
        if element in body.loads or element in stored:
            address = f"tl.load(pointers + row * {len(types) + 1} + {column})"
            setup.append(f"p_{element} = {address}.to(tl.pointer_type({kind})) + start")
            hints.append(f"a_{element} = tl.multiple_of(p_{element}, 16)")
    loads = _loads("numbers + row", body.scalars, numbers)
    setup += [f"{load}.to({compute})" for load in loads]
    sums = ("w_squares", "x_squares") if name == "measure" else ()
    setup += [f"{sum_} = tl.zeros([BLOCK], tl.float64)" for sum_ in sums]
    after = [f"tl.store(sums + 2 * chunk + {i}, tl.sum({sum_}))" for i, sum_ in enumerate(sums)]
    return FUNCTION.format(
        name=name,
        sums="sums, " if sums else "",
        width=len(types) + 1,
        setup=_indent(setup, 4),
        hints=_indent(hints, 8),
        whole=_indent(_loop(body, stored, types, compute, sums, masked=False), 12),
        masked=_indent(_loop(body, stored, types, compute, sums, masked=True), 12),
        after=_indent(after, 4),
    )


def _loop(
    body: Body,
    stored: dict[str, str],
    types: dict[str, str],
    compute: str,
    sums: tuple[str, ...],
    masked: bool,
) -> list[str]:
    mask, p = (", mask=mask, other=0.0", "p") if masked else ("", "a")
    lines = [
        f"{element} = tl.load({p}_{element} + offsets{mask}).to({compute})"
        for element in body.loads
    ]
    lines += [f"{name} = {expression}" for name, expression in body.statements]
    terms = {"w_squares": "w", "x_squares": body.result}
    for sum_ in sums:
        term = f"tl.where(mask, {terms[sum_]}, 0.0)" if masked else terms[sum_]
        wide = f"{term}.to(tl.float64)"
        lines.append(f"{sum_} += {wide} * {wide}")
    for element, value in stored.items():
        condition = ", mask=mask" if masked else ""
        lines.append(f"tl.store({p}_{element} + offsets, {value}.to({types[element]}){condition})")
    return lines


def _indent(lines: list[str], spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in lines) if lines else " " * spaces + "pass"
