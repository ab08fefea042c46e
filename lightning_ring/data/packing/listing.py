"""What a source of images yields."""

from __future__ import annotations

from typing import NamedTuple


class Found(NamedTuple):
    """An image and its class; a class that has no image is one with ``name`` None."""

    name: str | None
    class_name: str


class LeftOut(NamedTuple):
    """Something that is not packed, and why."""

    name: str
    reason: str
