"""A plain loop and a script for Horovod as ranks of srun, on two nodes."""

import sys

import pytest

from tests import forked
from tests.processes import ROOT
from tests.slurm.test_slurm import JOB_SECONDS, Job

LOOP = ROOT / "tests" / "loops" / "loop_script.py"
SCRIPT = """
import torch, lightning_ring.horovod as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
place = f'{hvd.local_rank()} of {hvd.local_size()}'
print(f'hvd {hvd.rank()} of {hvd.size()}, {place}: {total}', flush=True)
"""
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(JOB_SECONDS + 50)]


def test_srun_starts_loops_and_scripts_for_horovod(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = f"srun {sys.executable} {LOOP} 0 train; srun {sys.executable} {script}; echo code $?"
    options = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2"]
    output = Job(cluster, tmp_path, command, *options, **forked.ranks()).ended()
    assert "code 0" in output, output
    for rank in range(4):
        assert f"rank {rank} of 4: equal=True" in output, output
        assert f"hvd {rank} of 4, {rank % 2} of 2: 6.0" in output, output
