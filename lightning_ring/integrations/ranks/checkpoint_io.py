"""Checkpoint files that are whole: a failed save leaves the one before as it is."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO

from lightning_ring.host.whole_file import whole_file

_LONGEST = 100  # characters of a file's name, of which some file systems take 255 bytes


class WholeCheckpointIO(TorchCheckpointIO):
    """Writes a file beside the checkpoint, and renames it, which is atomic.

    `TorchCheckpointIO` copies across file systems: a full disk, or a death, then leaves a part of
    the new checkpoint in the place of the old one. The next save replaces a file that a killed
    process left.

    Checkpoints in object stores are written by `TorchCheckpointIO`.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        filesystem, local = url_to_fs(str(path))
        if storage_options is not None or not isinstance(filesystem, LocalFileSystem):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(local)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()  # torch's own writer does not say that a disk is full
        torch.save(checkpoint, content)
        part = target.with_name(f".{target.name[-_LONGEST:]}.part")
        with whole_file(target, through=part) as file:
            file.write(content.getbuffer())
