"""Names of files as text: Linux allows any bytes, also such as are no UTF-8."""

from __future__ import annotations


def printable(text: object) -> str:
    """``text`` with a mark in the place of bytes of a file's name that are no UTF-8, which nothing would print."""
    return str(text).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
