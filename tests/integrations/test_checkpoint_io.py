"""Checkpoint files are whole: a write that fails leaves the file before as it was."""

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

from lightning_ring import RingFabricStrategy, RingStrategy
from lightning_ring.integrations.ranks.checkpoint_io import WholeCheckpointIO
from tests.full_disk import files_of_at_most


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_before(tmp_path):
    path, files = tmp_path / "folder" / "last.ckpt", WholeCheckpointIO()
    files.save_checkpoint({"weights": torch.arange(10)}, path)
    with files_of_at_most(4096), pytest.raises(OSError, match="File too large"):
        files.save_checkpoint({"weights": torch.arange(100_000)}, path)
    assert torch.equal(files.load_checkpoint(path)["weights"], torch.arange(10))
    assert list(path.parent.iterdir()) == [path]
    (path.parent / ".last.ckpt.part").write_bytes(bytes(10_000_000))  # of a process that was killed
    files.save_checkpoint({"weights": torch.arange(20)}, str(path))
    assert torch.equal(files.load_checkpoint(path)["weights"], torch.arange(20))
    assert list(path.parent.iterdir()) == [path]


def test_names_that_are_long_or_urls(tmp_path):
    files = WholeCheckpointIO()
    for path in (
        str(tmp_path / f"{'x' * 245}.ckpt"),
        f"file://{tmp_path}/a.ckpt",
        "memory://folder/a.ckpt",
    ):
        files.save_checkpoint({"step": 3}, path)
        assert files.load_checkpoint(path) == {"step": 3}
    assert {file.name for file in tmp_path.iterdir()} == {f"{'x' * 245}.ckpt", "a.ckpt"}


def test_strategies_write_whole_files_unless_they_are_told_how_to_write():
    given = TorchCheckpointIO()
    for strategy in (RingStrategy, RingFabricStrategy):
        assert type(strategy().checkpoint_io) is WholeCheckpointIO
        assert strategy(checkpoint_io=given).checkpoint_io is given
    wrapping = RingStrategy(checkpoint_io=AsyncCheckpointIO()).checkpoint_io
    assert type(wrapping.checkpoint_io) is WholeCheckpointIO
    assert RingStrategy(checkpoint_io=AsyncCheckpointIO(given)).checkpoint_io.checkpoint_io is given
