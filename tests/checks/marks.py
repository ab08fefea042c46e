"""Marks on checks, by which `tests.battery.check_names` selects them. They change nothing in the
check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def by_world_size(check: Callable[..., Any]) -> Callable[..., Any]:
    """Its result can depend on the number of ranks: it runs on other numbers of ranks than two
    as well.
    """
    return check


def on_one_rank(check: Callable[..., Any]) -> Callable[..., Any]:
    """It needs a job of one rank."""
    return check
