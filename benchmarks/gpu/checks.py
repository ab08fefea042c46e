"""Checks whose outcomes are lines of JSON, as most stages of `benchmarks.gpu` print them."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning_ring

PACKAGE = Path(lightning_ring.__file__).parent
Check = Callable[[], Mapping[str, Any]]


def report(checks: Iterable[tuple[str, Check]], seconds: float = math.inf) -> int:
    """Print a line for each check; none begins later than after ``seconds``. A check that fails
    stops no other. Returns 1 if one failed, else 0.
    """
    until, failed = time.monotonic() + seconds, False
    for name, check in checks:
        if time.monotonic() > until:
            found: dict[str, Any] = {"check": name, "ok": False, "error": "out of time"}
        else:
            found = row(name, check)
        failed |= not found["ok"]
        print(json.dumps(found), flush=True)
    return int(failed)


def row(name: str, check: Check) -> dict[str, Any]:
    """What ``check`` found, or its error and where lightning_ring raised it."""
    began = time.monotonic()
    try:
        found = {"ok": True, **check()}
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        found = {"ok": False, "error": told[:600], "at": innermost(error)}
    return {"check": name, **found, "seconds": round(time.monotonic() - began, 2)}


def within(largest: float, allowed: float) -> dict[str, Any]:
    """The outcome of a comparison. NaN is not within anything."""
    return {"ok": largest <= allowed, "largest": largest, "allowed": allowed}


def worse(one: float, other: float) -> float:
    return math.nan if math.isnan(one) or math.isnan(other) else max(one, other)


def innermost(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(PACKAGE)]
    last = (own or frames)[-1]
    path = Path(last.filename)
    file = path.relative_to(PACKAGE) if own else path
    return f"{file}:{last.lineno}, {last.name}: {last.line}"
