"""scikit-learn's bundled handwritten digits: 1,797 real scans of 8x8 pixels, no download."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_ring.errors import ConfigurationError


def load_digits() -> tuple[Tensor, Tensor]:
    """Images ``[1797, 1, 8, 8]``, float32 in [0, 1], and labels ``[1797]``, int64.

    Raises:
        ConfigurationError: scikit-learn, or the file that it bundles, is missing.
    """
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            "The digits come with scikit-learn, which is not installed. Run: pip install "
            "'lightning-ring[recipes]'"
        ) from error
    try:
        pixels, labels = datasets.load_digits(return_X_y=True)
    except OSError as error:
        raise ConfigurationError(
            f"scikit-learn's digits cannot be read from {datasets.__path__[0]}/data ({error}). "
            "Run: pip install --force-reinstall --no-deps scikit-learn"
        ) from error
    return torch.from_numpy(pixels).float().div_(16).view(-1, 1, 8, 8), torch.from_numpy(
        labels
    ).long()
