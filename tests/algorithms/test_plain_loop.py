"""The plain PyTorch loop of the documentation trains with each algorithm, and one process on all samples agrees."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_ring.algorithms import ALGORITHMS
from tests.processes import ROOT, run

EXAMPLE = ROOT / "docs" / "examples" / "plain_loop.py"


def trained_by_one_process() -> nn.Module:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        nn.functional.mse_loss(model(samples), samples.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", ALGORITHMS)
def test_two_ranks_train_as_one_process_on_all_samples(name: str, tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    done = run([sys.executable, "-m", "lightning_ring.cli.ringrun", "-n", "2", str(EXAMPLE), name, path], timeout=100)
    assert done.returncode == 0, done.stdout
    found = torch.load(path)
    for key, expected in trained_by_one_process().state_dict().items():
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=1e-5)
