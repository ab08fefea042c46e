"""Writes a rule down as straight-line source code, for kernels in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

import torch

from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.rule import Rule, Scalars, ratio_and_rates, step_scalars

P = ParamSpec("P")
R = TypeVar("R")

_FUNCTIONS = {torch.where: "where", torch.minimum: "minimum"}


@dataclass(slots=True)
class Lines:
    """Statements in the order they must run, and the names of the scalars and tensors that they
    read. ``numbers``: whether an operand may be a Python number, which is then a double.
    """

    numbers: bool = False
    statements: list[tuple[str, str]] = field(default_factory=list)  # (name, expression)
    scalars: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def assign(self, expression: str) -> Symbol:
        name = f"t{len(self.statements)}"
        self.statements.append((name, expression))
        return Symbol(self, name)

    def call(self, function: str, *operands: Any) -> Symbol:
        return self.assign(f"{function}({', '.join(map(self.operand, operands))})")

    def operand(self, value: Any) -> str:
        if isinstance(value, Symbol):
            self.used.add(value.name)
            return value.name
        assert self.numbers, (
            f"a rule mixes tensors and {type(value).__name__}; put it among its scalars"
        )
        return self.assign(f"number(float('{float(value)}'))").name


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """A value in a kernel: a loaded element, a scalar, or a statement's result. The kernel defines
    the functions: ``sqrt``, and ``power``, ``where``, ``minimum``, ``number`` where it needs them.
    """

    lines: Lines
    name: str

    def __add__(self, other: Any) -> Symbol:
        return self._binary("+", other)

    def __sub__(self, other: Any) -> Symbol:
        return self._binary("-", other)

    def __mul__(self, other: Any) -> Symbol:
        return self._binary("*", other)

    def __truediv__(self, other: Any) -> Symbol:
        return self._binary("/", other)

    def __rsub__(self, other: Any) -> Symbol:
        return self._binary("-", other, swapped=True)

    def __rmul__(self, other: Any) -> Symbol:
        return self._binary("*", other, swapped=True)

    def __pow__(self, other: Any) -> Symbol:
        return self.lines.call("power", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return self._binary(">", other)

    def __ne__(self, other: Any) -> Symbol:  # type: ignore[override]
        return self._binary("!=", other)

    def __and__(self, other: Any) -> Symbol:
        return self._binary("&", other)

    def sqrt(self) -> Symbol:
        return self.lines.call("sqrt", self)

    def _binary(self, operator: str, other: Any, swapped: bool = False) -> Symbol:
        left, right = map(self.lines.operand, (other, self) if swapped else (self, other))
        return self.lines.assign(f"{left} {operator} {right}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Symbol:
        known = [f"torch.{name}" for name in _FUNCTIONS.values()]
        assert function in _FUNCTIONS, f"a rule calls {function}; a kernel knows {known}"
        lines = next(value.lines for value in args if isinstance(value, Symbol))
        return lines.call(_FUNCTIONS[function], *args)


class _ScalarSymbols(Scalars):
    """Makes a `Symbol` of every scalar that a rule asks for."""

    def __init__(self, lines: Lines) -> None:
        super().__init__(_lines=lines)

    def __getattr__(self, name: str) -> Symbol:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._lines.scalars:
            self._lines.scalars.append(name)
        return Symbol(self._lines, f"h_{name}")


@dataclass(frozen=True, slots=True)
class Body:
    """A kernel's arithmetic, for one element or for one parameter's numbers. Elements are ``w``,
    ``g``, ``s0``, ``s1``, ...; scalars ``h_<name>``.
    """

    statements: tuple[tuple[str, str], ...]  # name, expression
    loads: tuple[str, ...]  # elements that are read
    scalars: tuple[str, ...]  # names of the scalars that are read
    stores: tuple[tuple[str, str], ...]  # element or number, name of its new value
    result: str  # name of the direction, or of the trust ratio


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache` with the function's types; by its own, mypy refuses a class as a key."""
    wrapper: Any = functools.cache(function)
    return cast(Callable[P, R], wrapper)


def element_types(
    rule: type[Rule], kind: TensorKind, names: Mapping[torch.dtype, str]
) -> tuple[dict[str, str], str]:
    """A kernel's name for the type of each element (``mirror`` last, if there is one), and of
    the computation.
    """
    types = {"w": names[kind.weight], "g": names[kind.grad]}
    types |= {f"s{i}": names[kind.compute] for i in range(len(rule.state_names))}
    return types if kind.mirror is None else types | {"mirror": names[kind.mirror]}, names[
        kind.compute
    ]


@cached
def measure_body(rule: type[Rule]) -> Body:
    """``accumulate`` and ``direction``."""
    lines, w, g, state, h = _operands(rule)
    new_state = rule.accumulate(w, g, state, h)
    x = rule.direction(w, g, new_state, h)
    lines.used |= {x.name, w.name}
    return _body(lines, tuple(zip(state, new_state, strict=True)), x)


@cached
def move_body(rule: type[Rule]) -> Body:
    """``direction`` and ``move``."""
    lines, w, g, state, h = _operands(rule)
    x = rule.direction(w, g, state, h)
    new_w, new_state = rule.move(w, g, x, state, h)
    return _body(lines, ((w, new_w), *zip(state, new_state, strict=True)), x)


@cached
def scalars_body(rule: type[Rule]) -> Body:
    """`step_scalars`; hyper-parameters are the scalars that it reads, beside ``step`` and
    ``clip``.
    """
    lines = Lines(numbers=True)
    step = Symbol(lines, "step") if rule.counts_steps else None
    found = step_scalars(rule, _ScalarSymbols(lines), step, Symbol(lines, "clip"))
    return _numbers_body(lines, found, "")


@cached
def rates_body(rule: type[Rule]) -> Body:
    """`ratio_and_rates`, from ``w_squares`` and ``x_squares``."""
    lines = Lines(numbers=True)
    sums = Symbol(lines, "w_squares"), Symbol(lines, "x_squares")
    ratio, rates = ratio_and_rates(rule, sums, _ScalarSymbols(lines))
    return _numbers_body(lines, rates, ratio.name)


@cached
def number_names(rule: type[Rule]) -> tuple[str, ...]:
    """Names of a parameter's numbers, in the order of the columns of the kernels' table."""
    return tuple(name for body in (scalars_body, rates_body) for name, _ in body(rule).stores)


def _numbers_body(lines: Lines, found: Scalars, result: str) -> Body:
    stores = tuple((name, symbol.name) for name, symbol in vars(found).items())
    return Body(tuple(lines.statements), (), tuple(lines.scalars), stores, result)


def _operands(rule: type[Rule]) -> tuple[Lines, Symbol, Symbol, tuple[Symbol, ...], Scalars]:
    lines = Lines()
    state = tuple(Symbol(lines, f"s{i}") for i in range(len(rule.state_names)))
    return lines, Symbol(lines, "w"), Symbol(lines, "g"), state, _ScalarSymbols(lines)


def _body(lines: Lines, results: tuple[tuple[Symbol, Symbol], ...], x: Symbol) -> Body:
    stores = tuple((old.name, new.name) for old, new in results if new is not old)
    needed = {new for _, new in stores} | {x.name} | lines.used
    elements = ("w", "g", *(f"s{i}" for i in range(8)))
    loads = tuple(name for name in elements if name in needed)
    return Body(tuple(lines.statements), loads, tuple(lines.scalars), stores, x.name)
