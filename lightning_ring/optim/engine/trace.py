"""Writes a rule down as straight-line source code, for kernels in C++ and in Triton."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

import torch

from lightning_ring.optim.engine.parameter_list import TensorKind
from lightning_ring.optim.engine.rule import Rule, Scalars

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Lines:
    """Statements in the order they must run, and the names of the scalars and tensors that they
    read.
    """

    statements: list[tuple[str, str]] = field(default_factory=list)  # (name, expression)
    scalars: list[str] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def assign(self, expression: str) -> Symbol:
        name = f"t{len(self.statements)}"
        self.statements.append((name, expression))
        return Symbol(self, name)


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """A value in a kernel: a loaded element, a scalar, or a statement's result. ``sqrt`` is the
    kernel's to define.
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

    def sqrt(self) -> Symbol:
        self.lines.used.add(self.name)
        return self.lines.assign(f"sqrt({self.name})")

    def _binary(self, operator: str, other: Any) -> Symbol:
        assert isinstance(other, Symbol), (
            f"a rule mixes tensors and {type(other).__name__}; put it among its scalars"
        )
        self.lines.used |= {self.name, other.name}
        return self.lines.assign(f"{self.name} {operator} {other.name}")


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
    """A kernel's arithmetic, for one element. Elements are ``w``, ``g``, ``s0``, ``s1``, ...;
    scalars ``h_<name>``.
    """

    statements: tuple[tuple[str, str], ...]  # name, expression
    loads: tuple[str, ...]  # elements that are read
    scalars: tuple[str, ...]  # names of the scalars that are read
    stores: tuple[tuple[str, str], ...]  # element, name of its new value
    result: str  # name of the direction


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
