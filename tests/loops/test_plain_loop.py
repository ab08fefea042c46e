"""Plain PyTorch loops through `lightning_ring.distribute`: under every launcher, and when a rank
ends too early.
"""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_ring.algorithms import ALGORITHMS, algorithm_class
from tests import forked
from tests.processes import RINGRUN, ROOT, run

pytestmark = pytest.mark.ranks

EXAMPLE = ROOT / "docs" / "examples" / "plain_loop.py"
SCRIPT = str(ROOT / "tests" / "loops" / "loop_script.py")
TWO_RANKS = [*RINGRUN, "-n", "2"]
LAUNCHERS = {
    "ringrun": [*TWO_RANKS, SCRIPT, "2"],
    "python": [*forked.python(), SCRIPT, "2"],
    "alone": [*forked.python(), SCRIPT, "0"],
}


def trained_by_one_process():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(samples, samples.sum(1, keepdim=True))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=32, sampler=sampler):
            nn.functional.mse_loss(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if not algorithm_class(name).steps_alone]
)
def test_two_ranks_train_as_one_process_on_all_samples(name, tmp_path):
    path = str(tmp_path / "model.pt")
    done = run([*TWO_RANKS, *forked.python(), str(EXAMPLE), name, path])
    assert done.returncode == 0, done.stdout
    found = torch.load(path)
    for key, expected in trained_by_one_process().state_dict().items():
        torch.testing.assert_close(found[key], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_a_loop(launcher):
    done = run([*LAUNCHERS[launcher], "train"], **forked.ranks())
    assert done.returncode == 0, done.stdout
    ranks = 1 if launcher == "alone" else 2
    for rank in range(ranks):
        assert f"rank {rank} of {ranks}: equal=True" in done.stdout


def test_a_rank_that_ends_too_early_ends_the_job_and_is_named():
    done = run([*TWO_RANKS, "--no-mpi", *forked.python(), SCRIPT, "2", "leave"])
    assert done.returncode not in (0, 124), done.stdout
    assert "rank 1" in done.stdout
    assert "equal=" not in done.stdout
