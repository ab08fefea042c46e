"""Secrets in configurations that are shown: what stands under a name such as ``api_key``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# "tokenizer" and "max_tokens" hold none
_NAME = r"api_?key|secret|password|token(?![a-z])"
_SECRET = re.compile(_NAME, re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""((?:{_NAME})[\w.]*["']?\s*[=:]\s*)('[^']*'|"[^"]*"|[^\s,}}\]]+)""", re.IGNORECASE
)


def masked(value: Any) -> Any:
    """A copy of nested ``value`` without secrets, by name; in texts those of ``name=value``."""
    if isinstance(value, Mapping):
        return {
            key: MASK if _SECRET.search(str(key)) else masked(inner) for key, inner in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(masked(inner) for inner in value)
    return _ASSIGNED.sub(rf"\1{MASK}", value) if isinstance(value, str) else value
