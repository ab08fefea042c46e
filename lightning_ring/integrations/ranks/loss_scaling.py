"""Loss scalers, which skip a step where a gradient is not finite."""

from __future__ import annotations

from typing import Any

from lightning_ring.errors import ConfigurationError


def refuse_scaler(precision: Any, algorithm: str) -> None:
    """For an algorithm whose ranks step with gradients of their own.

    Raises:
        ConfigurationError: ``precision``, a plugin of Lightning or Fabric, has a loss scaler.
    """
    if getattr(precision, "scaler", None) is not None:
        raise ConfigurationError(
            f"algorithm {algorithm} got a precision with a loss scaler "
            f"({type(precision).__name__}, '16-mixed'): ranks would skip different steps. Use "
            "precision 'bf16-mixed', or algorithm='ring'."
        )
