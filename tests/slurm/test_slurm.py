"""Jobs of a real Slurm, brought up by `tests/slurm/cluster.py`: the statements of
docs/where-it-runs.md.
"""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest

from tests import forked
from tests.processes import ROOT, run
from tests.slurm.cluster import slurm

HERE = ROOT / "tests" / "slurm"
TRAIN = f"{sys.executable} {HERE / 'train_script.py'}"
PLACE = f"{sys.executable} {HERE / 'place_script.py'}"
BESIDE = Path(sys.executable).parent  # torchrun, ringrun and mpirun
JOB_SECONDS = 240.0
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(JOB_SECONDS + 50)]


class Job:
    """A batch job of ``script``; its output in ``output``."""

    def __init__(self, cluster, folder, script, *options, **env):
        self.cluster = cluster
        self._file = folder / "output"
        body = folder / "job.sh"
        body.write_text(f"#!/bin/bash\n{script}\n")
        environ = cluster.environ | env | {"PATH": f"{BESIDE}{os.pathsep}{os.environ['PATH']}"}
        command = ["sbatch", "--parsable", "--open-mode=append", f"--output={self._file}"]
        submitted = run([*command, f"--chdir={folder}", *options, str(body)], **environ)
        assert submitted.returncode == 0, submitted.stdout
        self.number = submitted.stdout.split()[-1]

    @property
    def output(self):
        return self._file.read_text() if self._file.exists() else ""

    def until(self, condition, what):
        deadline = time.monotonic() + JOB_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                slurm(self.cluster, "scancel", "--full", self.number)
                pytest.fail(f"{what}: not within {JOB_SECONDS:.0f} s. Output:\n{self.output}")
            time.sleep(0.1)

    def state(self):
        """``PENDING``, ``RUNNING``, ``COMPLETING``...; empty once it has ended."""
        options = ["--noheader", f"--jobs={self.number}", "--format=%T"]
        return slurm(self.cluster, "squeue", *options).strip()

    def ended(self):
        self.until(
            lambda: self.state() in ("", "slurm_load_jobs error: Invalid job id specified"),
            "the job's end",
        )
        return self.output

    def until_step_3(self, folder):
        self.until(lambda: len(list(folder.glob("step3.*"))) == 2, "both ranks in step 3")


def facts(folder, step=0):
    """What the ranks of a step wrote, by rank."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(f"{step}.*.json"))]


def test_srun_as_the_readme_shows_it_on_uneven_nodes_and_two_steps_at_a_time(cluster, tmp_path):
    script = (
        f"srun --overlap {TRAIN} plain {tmp_path} & srun --overlap -N 1 -n 2 {TRAIN} plain "
        f"{tmp_path} & wait"
    )
    output = Job(cluster, tmp_path, script, "--nodes=2", "--ntasks=3", **forked.ranks()).ended()
    by_step = sorted((facts(tmp_path, 0), facts(tmp_path, 1)), key=len)
    assert [len(ranks) for ranks in by_step] == [2, 3], output
    assert [rank["place"] for rank in by_step[1]] in (
        [[3, 0, 0], [3, 1, 0], [3, 0, 1]],
        [[3, 0, 0], [3, 0, 1], [3, 1, 1]],
    )
    assert [rank["place"] for rank in by_step[0]] == [[2, 0, 0], [2, 1, 0]]
    for ranks in by_step:
        assert {rank["source"] for rank in ranks} == {"slurm"}
        assert all(rank["weights"] == ranks[0]["weights"] for rank in ranks)
        assert ranks[0]["weights"][0] == pytest.approx(ranks[0]["weights"][1], rel=1e-5)
        for rank in ranks:
            assert (
                f"Trainer(devices=7, num_nodes=1) asks for 7 ranks, but srun started {len(ranks)}"
                in rank["told"]
            )


PLACES = {  # name: command, source and ranks that it has to find
    "batch": ("LOCAL_RANK=1 {place}", "single", 1),
    "step": ("LOCAL_RANK=0 WORLD_SIZE=8 srun -n 2 {place}", "slurm", 2),
    "by-hand": ("RANK=0 WORLD_SIZE=2 srun -n 2 {place}", "slurm", 2),
    "no-environment": ("srun --export=NONE -n 2 {place}", "slurm", 2),
    "interactive": ("srun --job-name=interactive -n 2 {place}", "slurm", 2),
    "pmi2": ("srun --mpi=pmi2 -n 2 {place}", "slurm", 2),
    "one-task": ("srun -n 1 {place}", "single", 1),
    "mpirun": ("LOCAL_RANK=0 mpirun --allow-run-as-root --oversubscribe -n 2 {place}", "mpi", 2),
    "srun-mpirun": ("srun -n 1 mpirun --allow-run-as-root --oversubscribe -n 2 {place}", "mpi", 2),
    "torchrun": ("torchrun --nproc-per-node 2 {script}", "torchrun", 2),
}


def test_every_launcher_inside_a_batch_job_and_stray_variables(cluster, tmp_path):
    lines = [
        command.format(place=f"{PLACE} {name}", script=f"{HERE / 'place_script.py'} {name}")
        for name, (command, _, _) in PLACES.items()
    ]
    output = Job(cluster, tmp_path, "\n".join(lines), "--ntasks=2").ended()
    for name, (_, source, size) in PLACES.items():
        found = sorted(line for line in output.splitlines() if line.startswith(f"{name}: "))
        assert found == [
            f"{name}: {source} {rank} {size} {rank} {size} 0 1" for rank in range(size)
        ], output


def test_sigusr1_saves_on_all_ranks_and_the_job_goes_on_when_it_starts_again(cluster, tmp_path):
    job = Job(cluster, tmp_path, f"srun {TRAIN} requeue {tmp_path}", "--ntasks=2")
    job.until_step_3(tmp_path)
    # what `sbatch --signal=USR1@90` has sent
    slurm(cluster, "scancel", "--signal=USR1", job.number)
    job.until(lambda: job.state() == "PENDING", "back in the queue")
    assert (tmp_path / "hpc_ckpt_1.ckpt").exists(), job.output
    # Slurm waits two minutes by itself
    slurm(cluster, "scontrol", "update", f"JobId={job.number}", "StartTime=now")
    output = job.ended()
    assert f"Slurm job {job.number} is queued again" in output
    assert "killed by signal" not in output  # the data-loader workers, which got it too
    ranks = facts(tmp_path)
    assert len(ranks) == 2, output
    assert ranks[0]["first_step"] == ranks[1]["first_step"] == ranks[0]["steps"] - 5 > 3


def test_scancel_has_all_ranks_save_and_end(cluster, tmp_path):
    job = Job(cluster, tmp_path, f"srun {TRAIN} stop {tmp_path}", "--ntasks=2")
    job.until_step_3(tmp_path)
    slurm(cluster, "scancel", job.number)
    output = job.ended()
    assert (tmp_path / "stopped.ckpt").exists(), output
    assert "Traceback" not in output
    assert not facts(tmp_path)


def test_a_rank_that_is_killed_ends_the_step_and_is_named(cluster, tmp_path):
    output = Job(
        cluster, tmp_path, f"srun {TRAIN} die {tmp_path}\necho exit $?", "--ntasks=2"
    ).ended()
    assert re.search(r"lightning_ring: rank 0 ends: rank 1 \(host \S+, pid \d+\) died", output), (
        output
    )
    assert "exit 0" not in output
    assert not facts(tmp_path)
