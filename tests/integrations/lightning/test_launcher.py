"""Plain ``python script.py``: the launcher makes ranks of it. (Through a Trainer: with the
strategy's tests.)
"""

import sys
from pathlib import Path

import pytest

from lightning_ring.errors import ConfigurationError, RankDiscoveryError
from lightning_ring.integrations.ranks.environment import RingEnvironment
from lightning_ring.integrations.ranks.launcher import RingLauncher
from tests import forked
from tests.processes import ROOT, mpirun_path, run

HERE = ROOT / "tests" / "integrations" / "lightning"


SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("variables", "source"),
    [({}, "mpi"), (SLURM, "ringrun")],
    ids=["by mpirun", "in a Slurm job of one task, where mpirun would find one slot"],
)
def test_ranks_run_the_script_and_the_parent_returns_their_code(variables, source, tmp_path):
    if mpirun_path() is None:
        pytest.skip("no mpirun beside this Python")
    command = [*forked.python(), str(HERE / "launched_script.py"), str(tmp_path)]
    result = run(command, **forked.ranks(), **variables)
    assert result.returncode == 7, result.stdout  # rank 1's
    assert [(tmp_path / f"rank.{rank}").read_text() for rank in range(2)] == [f"2 {source}"] * 2
    # what follows the launch runs in the ranks, not in the parent
    assert len(list(tmp_path.glob("after.*"))) == 2


@pytest.mark.ranks
def test_hydra_sweep_one_job_after_the_other_each_in_one_folder(tmp_path):
    pytest.importorskip("hydra")
    script = [*forked.python(), "-m", "tests.integrations.lightning.hydra_script", "-m"]
    words = ["+lr=1,2", f"+folder={tmp_path}", "+begun=${now:%H:%M:%S.%f}"]
    result = run([*script, *words, f"hydra.sweep.dir={tmp_path}/out"], **forked.ranks())
    assert result.returncode == 0, result.stdout
    for job, lr in enumerate((1, 2)):
        texts = {(tmp_path / f"{lr}.{rank}").read_text() for rank in range(2)}
        assert len(texts) == 1, f"ranks were configured differently: {texts}"
        output, begun, _ = texts.pop().split()
        assert output == (tmp_path / f"parent.{lr}").read_text() == str(tmp_path / "out" / str(job))
        assert begun.count(":") == 2
    assert len([path for path in Path(tmp_path, "out").iterdir() if path.is_dir()]) == 2
    assert "UserWarning" not in result.stdout


def test_several_nodes_need_a_launcher():
    with pytest.raises(ConfigurationError, match=r"num_nodes=2.*ringrun -n 4 -H host1:2"):
        RingLauncher(RingEnvironment(), 2, 2, use_mpi=True).launch(print)


def test_a_rank_whose_variables_are_gone_does_not_start_ranks_again(monkeypatch):
    monkeypatch.setenv("RING_LAUNCHER_PID", "4711")
    with pytest.raises(RankDiscoveryError, match="started as a rank"):
        RingLauncher(RingEnvironment(), 2, 1, use_mpi=False).launch(print)


@pytest.mark.ranks
def test_no_script_no_ranks():
    program = "from lightning_ring.launch.rerun import own_command; own_command().__enter__()"
    result = run([sys.executable, "-c", program])
    assert result.returncode == 1
    assert "Write a script, use RingStrategy(start_method='fork')" in result.stdout


@pytest.mark.ranks
def test_in_a_notebook_the_ranks_are_forks(tmp_path):
    program = f"""
import sys
sys.ps1 = ">>> "  # as a notebook and a prompt have it
import lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_ring
model = BoringModel()
trainer = L.Trainer(strategy="ring", accelerator="cpu", devices=2, max_steps=2, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    default_root_dir={str(tmp_path)!r})
trainer.fit(model)
print("ranks", trainer.world_size)
"""
    result = run([sys.executable, "-c", program])
    assert result.returncode == 0, result.stdout
    assert "`max_steps=2` reached" in result.stdout
    # the rest of the notebook runs once
    assert result.stdout.count("ranks 2\n") == 1, result.stdout
