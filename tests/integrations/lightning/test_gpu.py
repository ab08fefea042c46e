"""Training on a GPU: one rank, whose collectives NCCL really carries, against a plain device."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.processes import run


@pytest.mark.ranks
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_every_way_of_training_gives_what_a_plain_device_gives() -> None:
    done = run([sys.executable, "-m", "benchmarks.gpu", "--stages", "ways"], timeout=280)
    assert done.returncode == 0, done.stdout
