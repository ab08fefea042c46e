"""What a check found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "broken"]
_BY_GRAVITY: tuple[State, ...] = ("ok", "warning", "broken")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. ``advice`` says what to do, and is empty where all is well."""

    name: str
    state: State
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Finding:
    return Finding(name, "ok", found)


def warning(name: str, found: str, advice: str) -> Finding:
    """Works, but slowly, or not for everything."""
    return Finding(name, "warning", found, advice)


def broken(name: str, found: str, advice: str) -> Finding:
    """Some job that people start will not start, will hang, or will give wrong results."""
    return Finding(name, "broken", found, advice)


def worst(findings: Iterable[Finding]) -> State:
    return max((finding.state for finding in findings), key=_BY_GRAVITY.index, default="ok")
