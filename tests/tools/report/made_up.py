"""Folders of runs, written without training."""

import numpy
from torch.utils.tensorboard import SummaryWriter


def write_run(
    folder,
    scalars,
    *,
    config="",
    pictures=(),
):
    """Values at steps 0, 1, ...; a picture a tag; ``config`` as hparams.yaml."""
    with SummaryWriter(str(folder)) as writer:
        for tag, values in scalars.items():
            for step, value in enumerate(values):
                writer.add_scalar(tag, value, step)
        for tag in pictures:
            for step in range(3):
                writer.add_image(tag, numpy.full((1, 8 + step, 8), 0.5), step)
    if config:
        (folder / "hparams.yaml").write_text(config)
    return folder
