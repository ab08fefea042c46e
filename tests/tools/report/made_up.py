"""Folders of runs, written without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy
from torch.utils.tensorboard import SummaryWriter


def write_run(
    folder: Path,
    scalars: Mapping[str, Sequence[float]],
    *,
    overrides: Sequence[str] = (),
    config: str = "",
    pictures: Sequence[str] = (),
) -> Path:
    """Values at steps 0, 1, ...; a picture a tag; Hydra's files where there is a ``config``."""
    with SummaryWriter(str(folder)) as writer:
        for tag, values in scalars.items():
            for step, value in enumerate(values):
                writer.add_scalar(tag, value, step)
        for tag in pictures:
            for step in range(3):
                writer.add_image(tag, numpy.full((1, 8 + step, 8), 0.5), step)
    if config:
        (folder / ".hydra").mkdir()
        (folder / ".hydra" / "config.yaml").write_text(config)
        (folder / ".hydra" / "overrides.yaml").write_text(
            "".join(f"- {word}\n" for word in overrides) or "[]"
        )
    return folder
