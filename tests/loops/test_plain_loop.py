"""Plain PyTorch loops through `lightning_ring.distribute`: under every launcher, and when a rank
ends too early.
"""

import pytest
import torch

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


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """What a single process makes of all samples."""
    folder = tmp_path_factory.mktemp("alone")
    script, path = folder / "loop.py", folder / "model.pt"
    script.write_text(EXAMPLE.read_text().replace("batch_size=16", "batch_size=32"))
    done = run([*forked.python(), str(script), "ring", str(path)])
    assert done.returncode == 0, done.stdout
    return torch.load(path)


@pytest.mark.parametrize(
    "name", [name for name in ALGORITHMS if not algorithm_class(name).steps_alone]
)
def test_two_ranks_train_as_one_process_on_all_samples(name, of_one_process, tmp_path):
    path = str(tmp_path / "model.pt")
    done = run([*TWO_RANKS, *forked.python(), str(EXAMPLE), name, path])
    assert done.returncode == 0, done.stdout
    found = torch.load(path)
    for key, expected in of_one_process.items():
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
