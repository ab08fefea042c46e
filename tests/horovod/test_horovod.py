"""`lightning_ring.horovod`: on two ranks, in a single process, and the script of the guide with
one changed import.
"""

import re

import pytest
import torch

import lightning_ring.horovod as hvd
from lightning_ring.errors import ConfigurationError
from lightning_ring.horovod.variables import cpu_backend
from tests import forked
from tests.battery import check_names
from tests.processes import RINGRUN, ROOT, mpirun_command, run

MODULE = "tests.checks.horovod"
ON_FOUR_RANKS = (
    "check_names_may_come_in_another_order_on_each_rank",
    "check_join_adds_zeros_until_all_have_joined",
    "check_batch_norm_sees_the_samples_of_all_ranks",
    "check_shutdown_ends_what_other_ranks_wait_for_in_any_process_set",
    "check_join_takes_part_in_gradients_with_zeros",
    "check_optimizers_over_process_sets_are_counted_by_set",
)
TWO_RANKS = [*RINGRUN, "--no-mpi", "-n", "2", *forked.python()]
GUIDE = (ROOT / "docs" / "guides" / "from-horovod.md").read_text()


@pytest.mark.ranks
@pytest.mark.parametrize("check", check_names(MODULE))
def test_on_two_ranks(battery, check):
    battery(MODULE, 2, check)


@pytest.mark.ranks
@pytest.mark.parametrize("check", ON_FOUR_RANKS)
def test_on_four_ranks(battery, check):
    battery(MODULE, 4, check, only=ON_FOUR_RANKS)


@pytest.mark.ranks
def test_the_script_of_the_guide_runs_with_one_changed_import(tmp_path):
    before = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0]
    assert before.count("import horovod.torch as hvd") == 1
    (tmp_path / "script.py").write_text(
        before.replace("import horovod.torch", "import lightning_ring.horovod")
    )
    command = mpirun_command(2, "--wdir", str(tmp_path), *forked.python(), "script.py")
    done = run(command, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout
    assert list(tmp_path.glob("*.pt"))


DIES = """
import os, signal, torch, lightning_ring.horovod as hvd
hvd.init()
for step in range(4):
    if step == 2 and hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    handle = hvd.allreduce_async(torch.ones(2), name='gradient')
    while not hvd.poll(handle):
        pass
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        print('caught', type(error.__cause__).__name__)
        raise
print('the end')
"""


@pytest.mark.ranks
def test_a_rank_that_dies_ends_the_job_and_is_named(tmp_path):
    (tmp_path / "script.py").write_text(DIES)
    done = run([*TWO_RANKS, str(tmp_path / "script.py")])
    assert done.returncode == 137, done.stdout
    assert "caught PeerFailedError" in done.stdout
    assert "rank 0 ends: rank 1 (host" in done.stdout
    assert "rank 0 failed" not in done.stdout
    assert "the end" not in done.stdout


LEAVES = """
import sys, torch, lightning_ring.horovod as hvd
hvd.init()
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
for step in range(4):
    if step == 2 and hvd.rank() == 1:
        sys.exit(0)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
print('the end')
"""


@pytest.mark.ranks
def test_a_rank_that_ends_early_ends_the_job(tmp_path):
    (tmp_path / "script.py").write_text(LEAVES)
    done = run([*TWO_RANKS, str(tmp_path / "script.py")])
    assert done.returncode == 1, done.stdout
    assert (
        "rank 0 failed: HorovodInternalError: the Horovod API was shut down on rank 1"
        in done.stdout
    )
    assert "the end" not in done.stdout


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.usefixtures("alone")
def test_a_single_process_is_a_job_of_one_rank():
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size()) == (0, 1, 0, 1)
    assert hvd.allreduce(torch.tensor([2.0]), prescale_factor=3.0).item() == 6.0
    assert hvd.allgather(torch.ones(2, 3)).shape == (2, 3)
    assert hvd.broadcast_object([1]) == [1]
    assert hvd.join() == 0
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    assert not model.weight._post_accumulate_grad_hooks
    model(torch.ones(1, 1)).sum().backward()
    optimizer.synchronize()
    with optimizer.skip_synchronize():
        optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"named_parameters": [("a", None), ("a", None)]}, "must be unique. Found duplicates: a"),
        ({"named_parameters": []}, r"not named \(2 of them\)"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "not supported with op != Average"),
        ({"op": hvd.Max}, "got op=Max, expected Average or Sum"),
        ({"op": hvd.Adasum}, "op=Adasum is not supported"),
    ],
)
def test_bad_arguments_of_the_optimizer(arguments, expected):
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match=expected):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def test_an_unknown_library_is_refused(monkeypatch):
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "CCL")
    with pytest.raises(
        ConfigurationError, match="HOROVOD_CPU_OPERATIONS='CCL': expected GLOO or MPI"
    ):
        cpu_backend()
    monkeypatch.setenv("HOROVOD_CPU_OPERATIONS", "GLOO")
    assert cpu_backend() == "gloo"
